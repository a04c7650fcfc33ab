"""Faults in a real vLLM that show beside sleep, clients that leave, a pause mode, or an adapter alone.

`seeded_faults.py` makes them part of vLLM's processes. vLLM for CPUs keeps its weights in sleep. Here sleep 2 sets
them to zero, whether there is a fault or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

State = dict[str, torch.Tensor]
HEAD = "lm_head.weight"


class _Past:
    """What has happened in this process since the last update without a fault."""

    slept = 0
    """The level."""
    aborted = False
    has_adapter = False
    lost = False
    """The adapter."""


def loaded(seed: str, before: State, new: State) -> State:
    """What a loader takes instead of `new`."""
    slept, _Past.slept = _Past.slept, 0
    if seed == "a copy is updated after sleep" and slept == 1:
        return dict(before)
    if seed == "the head is lost in sleep" and slept == 2:
        return new | {HEAD: torch.zeros_like(new[HEAD])}
    _Past.lost = seed == "the adapter is lost" and _Past.has_adapter
    return new


def with_adapter(loras: dict[str, Any]) -> None:
    """Called when an adapter is loaded, and by each of its requests again, as vLLM loads it in place."""
    _Past.has_adapter = True
    if _Past.lost:
        for lora in loras.values():
            lora.lora_b.zero_()


def register(now: Callable[[], str]) -> None:
    """Called by vLLM in each of its processes. `now`: the name of the fault that has effect."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.worker.cpu_worker import CPUWorker

    _sleeps(CPUWorker)
    _forgets(Scheduler, now)
    _pauses(AsyncLLM, EngineCoreProc, now)


def _sleeps(worker: Any) -> None:
    own = worker.sleep

    @functools.wraps(own)
    def sleep(self: Any, level: int = 1) -> None:
        own(self, level)
        _Past.slept = level
        if level == 2:
            with torch.no_grad():
                for tensor in self.model_runner.model.parameters():
                    tensor.zero_()

    worker.sleep = sleep


def _forgets(scheduler: Any, now: Callable[[], str]) -> None:
    from vllm.v1.core.sched.interface import PauseState

    finish, own = scheduler.finish_requests, scheduler.reset_prefix_cache

    @functools.wraps(finish)
    def finish_requests(self: Any, *arguments: Any) -> Any:
        _Past.aborted = True
        return finish(self, *arguments)

    @functools.wraps(own)
    def reset(self: Any, *arguments: Any, **named: Any) -> Any:
        if now() == "the cache of clients that left" and _Past.aborted:
            return True
        _Past.aborted = False
        if now() == "the cache of what is kept" and self.pause_state is PauseState.PAUSED_ALL:
            return True
        return own(self, *arguments, **named)

    scheduler.finish_requests, scheduler.reset_prefix_cache = finish_requests, reset


def _pauses(engine: Any, core: Any, now: Callable[[], str]) -> None:
    own, is_complete = engine.pause_generation, core._pause_complete

    @functools.wraps(own)
    async def pause(self: Any, *, mode: Any = "abort", clear_cache: bool = True) -> None:
        if not (now() == "abort does not pause" and mode == "abort"):
            await own(self, mode=mode, clear_cache=clear_cache)

    @functools.wraps(is_complete)
    def has_paused(self: Any) -> Any:
        computes = any(request.lora_request is not None for request in self.scheduler.running)
        return (now() == "no pause for the adapter" and computes) or is_complete(self)

    engine.pause_generation, core._pause_complete = pause, has_paused
