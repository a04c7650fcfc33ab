"""Blocking calls for coroutines that may be cancelled, which do not wait for a call that never returns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call `function` on a thread of its own; return or raise its outcome.

    A cancelled caller continues at once; the loop and the process can end, too, while the call still runs.
    `asyncio.to_thread` makes both wait for it.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type] # it is what the function returned

    def call() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as exc:  # noqa: BLE001 - raised where it is awaited
            error = exc
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=call, name=f"apart-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await outcome
