"""Control calls of vLLM that end when its engine core does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

LIVENESS_S = 0.5
"""The interval at which a long control call checks that the engine core is alive."""


async def controlled(running: Callable[[], AsyncLLM], call: Coroutine[Any, Any, T]) -> T:
    """What vLLM answers to `call`. Raises EngineDeadError, and what `running` raises, which gives the engine.

    vLLM fails requests when its engine core dies, but a control call in flight then would wait for ever.
    """
    answer = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([answer], timeout=LIVENESS_S))[0]:
            await running().check_health()
        return answer.result()
    finally:
        answer.cancel()
