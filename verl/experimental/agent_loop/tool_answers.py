"""Gets a tool's answer within its deadline, even if the tool raises or blocks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.experimental.agent_loop.tools import AgentData, BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.chat_template import well_formed
from verl.utils.plain import as_text, plain

T = TypeVar("T")
ANSWERS_WITHIN_S = 1.0
"""After a tool's deadline, its thread counts as blocked if it runs nothing else within this time."""

logger = logging.getLogger(__name__)


def answer_text(answer: Any) -> str:
    """A tool's result as text: bytes as UTF-8, None as "", lists and dicts as JSON."""
    if answer is None:
        return ""
    if isinstance(answer, (bytes, bytearray, memoryview)):
        return bytes(answer).decode(errors="replace")
    if isinstance(answer, (dict, list, tuple)):
        try:
            return json.dumps(answer, ensure_ascii=False, default=plain)
        except (ValueError, TypeError, RecursionError):  # it contains itself, or keys that JSON has not
            return as_text(answer)
    return as_text(answer)


class ToolThread:
    """The thread in which a process runs tools, so that a blocking tool blocks neither samples nor the worker."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None

    async def answer(
        self,
        tool: BaseTool,
        arguments: dict[str, Any],
        agent_data: AgentData,
        *,
        timeout_s: float,
        has_begun: bool = False,
    ) -> ToolResponse:
        """The tool's whole answer, or a text with its error. `has_begun`: in a process that died."""
        ask = tool.outcome_of if has_begun else tool.answer
        try:
            return await self.run(_executed(ask, arguments, agent_data), tool.name, timeout_s=timeout_s)
        except TimeoutError as exc:
            return ToolResponse(text=f"error: {exc}")

    async def run(self, work: Coroutine[Any, Any, T], name: str, *, timeout_s: float) -> T:
        """Return or raise the outcome of `work`. Raises TimeoutError with `name` after `timeout_s`."""
        if self._thread is None:
            self._thread = LoopThread("tools")
        thread = self._thread
        outcome = thread.start(work)
        waiting = asyncio.wrap_future(outcome)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
        finally:
            if not outcome.done():
                thread.cancel(outcome)
        if done:
            return waiting.result()
        waiting.add_done_callback(lambda late: late.cancelled() or late.exception())
        await self._leave_if_blocked(thread, name)
        raise TimeoutError(f"{name} did not answer within {timeout_s} s")

    async def _leave_if_blocked(self, thread: LoopThread, name: str) -> None:
        """The next tools run in another thread; nobody can end this one."""
        ping = asyncio.wrap_future(thread.start(asyncio.sleep(0)))
        done, _ = await asyncio.wait({ping}, timeout=ANSWERS_WITHIN_S)
        if not done and self._thread is thread:
            logger.warning("the tool %s, or one beside it, blocks its thread; other tools go on in a new one", name)
            self._thread = None


async def _executed(
    ask: Callable[[dict[str, Any], AgentData], Awaitable[Any]], arguments: dict[str, Any], agent_data: AgentData
) -> ToolResponse:
    try:
        answer = await ask(arguments, agent_data)
        return answer if isinstance(answer, ToolResponse) else ToolResponse(text=answer_text(answer))
    except BaseException as exc:  # noqa: BLE001 - the model gets the error, as it would from any tool
        return ToolResponse(text=f"error: {type(exc).__name__}: {as_text(exc)}")


def cut(text: str, limit: int, side: str) -> str:
    """`text`, or `limit` of its characters with verl's note in place of the others: left, right or middle."""
    if len(text) > limit:
        if side == "left":
            text = f"(truncated)...{text[-limit:]}"
        elif side == "right":
            text = f"{text[:limit]}...(truncated)"
        else:
            half = limit // 2
            text = f"{text[:half]}...(truncated)...{text[len(text) - half :]}"
    return well_formed(text)
