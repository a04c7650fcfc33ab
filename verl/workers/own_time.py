"""Measure the seconds that a trainer rank computes without waiting for other ranks.

All ranks of a group take the same time for a step, because they wait for each other in collectives. Only the time of
blocks of the model without collectives shows a slow rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class HasOwnBlocks(Protocol):
    """A training engine whose model has such blocks."""

    def own_blocks(self) -> list[nn.Module]:
        """Modules whose forward passes are free of collectives, the same on every rank, or on every rank of a stage."""


@dataclass(frozen=True)
class Own:
    """A rank's own computing time in one phase of a step."""

    seconds: float = 0.0
    tokens: int = 0
    """Tokens, with padding, summed over blocks."""

    def __add__(self, other: Own) -> Own:
        return Own(self.seconds + other.seconds, self.tokens + other.tokens)


class Clock(Protocol):
    """The clock of the device that computes."""

    def now(self) -> Any:
        """A mark after the work queued so far. Does not wait."""

    def settle(self) -> None:
        """Wait until the device has reached all marks."""

    def seconds(self, began: Any, ended: Any) -> float:
        """The seconds between two marks, after `settle`."""


class HostClock:
    """The clock of the host, whose work is done when a call returns."""

    def now(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        pass

    def seconds(self, began: float, ended: float) -> float:
        return ended - began


class EventClock:
    """The clock of an accelerator, which computes after a call has returned: it records events in its stream."""

    def __init__(
        self,
        device: str,
        *,
        event: Callable[..., Any] = torch.Event,
        synchronize: Callable[[], None] = torch.accelerator.synchronize,
    ) -> None:
        self._device, self._event, self._synchronize = device, event, synchronize

    def now(self) -> Any:
        event = self._event(self._device, enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        self._synchronize()

    def seconds(self, began: Any, ended: Any) -> float:
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds / 1e3


def clock_of(device: str) -> Clock:
    return HostClock() if device == "cpu" else EventClock(device)


class OwnTime:
    """The own time of one rank. It times forward passes, also those that gradient checkpointing repeats."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._phase = ""
        self._began: dict[int, Any] = {}
        self._laps: dict[str, list[tuple[Any, Any, int]]] = {}

    def watch(self, blocks: Iterable[nn.Module]) -> None:
        """Time the forward passes of these modules from now on."""
        for block in blocks:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end, prepend=True)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the work of this block as `phase`."""
        self._phase = phase
        try:
            yield
        finally:
            self._phase = ""

    def take(self) -> dict[str, Own]:
        """The own time by phase, since the last call."""
        laps, self._laps = self._laps, {}
        if laps:
            self._clock.settle()
        seconds = self._clock.seconds
        return {phase: sum((Own(seconds(*lap[:2]), lap[2]) for lap in of), Own()) for phase, of in laps.items()}

    def _begin(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._began[id(block)] = self._clock.now()

    def _end(self, block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        began = self._began.pop(id(block), None)
        first = inputs[0] if inputs else None
        if began is not None and self._phase and isinstance(first, torch.Tensor):
            lap = began, self._clock.now(), first.shape[:-1].numel()
            self._laps.setdefault(self._phase, []).append(lap)


Owns = Mapping[str, Own]
"""The own time of one rank, by phase."""


def named_blocks(model: nn.Module, last_name: str) -> list[nn.Module]:
    """The outermost modules of `model` whose names end with one of the suffixes."""
    found = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == last_name]
    return [model.get_submodule(name) for name in found if not any(name.startswith(f"{one}.") for one in found)]
