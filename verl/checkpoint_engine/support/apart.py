"""Calls that block, for coroutines that may be given up: nobody waits for a call that does not come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def apart(function: Callable[..., T], *arguments: Any) -> T:
    """What `function` returns or raises, called on a thread of its own.

    Who is cancelled goes on at once, and so do the end of the loop and of the process; `asyncio.to_thread` has both
    wait for the call. It may still come to its end, or not.
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
