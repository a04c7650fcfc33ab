"""Drivers of SGLang's routes that forget or mistake something."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl.checkpoint_engine.conformance.sglang_routes import (
    SGLangDiskRoute,
    SGLangDistributedRoute,
    SGLangTensorRoute,
)


class Unlabelled(SGLangDiskRoute):
    """Forgets to name the version."""

    UPDATE = {"load_format": "auto", "weight_version": None}


class Unflushed(SGLangDiskRoute):
    """Forgets to empty the prefix cache."""

    FLUSHES = False

    def _flush(self) -> None:
        """Not at all."""


class WithoutLabel(SGLangTensorRoute):
    """Forgets to name the version."""

    @contextmanager
    def _connected(self) -> Iterator[Callable[..., None]]:
        with super()._connected() as load:
            yield lambda chunk, more: load(chunk, more | {"weight_version": None})


class WithoutChunk(SGLangTensorRoute):
    """Forgets the second request of a load."""

    @contextmanager
    def _connected(self) -> Iterator[Callable[..., None]]:
        numbers = itertools.count(1)
        with super()._connected() as load:
            yield lambda *chunk: None if next(numbers) == 2 else load(*chunk)


class Exchanged(SGLangDistributedRoute):
    """Announces tensors of one shape in another order than it sends them."""

    @contextmanager
    def _connected(self) -> Iterator[Callable[..., None]]:
        def other(name: str) -> str:
            return name.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj")

        with super()._connected() as load:
            yield lambda chunk, more: load([(other(name), tensor) for name, tensor in chunk], more)


class WithoutFlush(SGLangDistributedRoute):
    """Forgets to empty the prefix cache."""

    FLUSHES = False

    def _flush(self) -> None:
        """Not at all."""


OVER = [
    (WithoutLabel, "", "wrong label"),
    (WithoutChunk, "", "partly loaded"),
    (SGLangTensorRoute, "skips model.norm", "partly loaded"),
    (Exchanged, "", "wrongly loaded"),
    (WithoutFlush, "", "stale cache"),
    (SGLangDistributedRoute, "rounds model.layers.0.self_attn.o_proj", "wrongly loaded"),
]
"""A route, a fault of `sglang_faults`, and the name of what is wrong then."""
