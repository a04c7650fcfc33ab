"""How verl 0.9 pauses a server, in vLLM's present words: from 0.32 on vLLM has not the argument that verl gives it."""

from __future__ import annotations

import inspect
import sys
from typing import Any

VERLS_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
DROPPED = "wait_for_inflight_requests"


def take_dropped_argument() -> None:
    """In a process with a server of verl's, let `AsyncLLM.pause_generation` take `DROPPED` again. Idempotent.

    True is what vLLM calls `mode="wait"` now, and False what it does by itself: requests in flight are aborted.
    Nothing is changed where vLLM still takes it, and in processes without such a server.
    """
    if VERLS_SERVER not in sys.modules:
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    if DROPPED in inspect.signature(AsyncLLM.pause_generation).parameters:
        return
    pause = AsyncLLM.pause_generation

    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool = False, **options: Any) -> None:
        if wait_for_inflight_requests:
            options["mode"] = "wait"
        await pause(self, **options)

    AsyncLLM.pause_generation = pause_generation  # type: ignore[method-assign]
