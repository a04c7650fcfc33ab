"""Await calls to many members under one deadline, and name the members that failed or are late."""

from __future__ import annotations

import asyncio
from asyncio import wait
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from ..errors import CheckpointEngineError, TransportTimeout, as_ours

T = TypeVar("T")


async def all_within(
    timeout_s: float, calls: Mapping[str, Awaitable[T]], *, version: int | None, phase: str
) -> dict[str, T]:
    """Return the results by member name. The first failure ends the wait and cancels the other calls.

    Raises the error of the member that failed, completed by `located`. Raises TransportTimeout after `timeout_s`; it
    lists the members that are done and those that are not.
    """
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    if not tasks:
        return {}
    try:
        done, pending = await wait(tasks.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        errors = {name: task.exception() for name, task in tasks.items() if task in done}
        for name, error in errors.items():
            if error is not None:
                raise located(error, version=version, phase=phase, member=name)
        if pending:
            raise TransportTimeout(_who(tasks, timeout_s), version=version, phase=phase)
        return {name: task.result() for name, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()


async def each_within(
    timeout_s: float, calls: Mapping[str, Awaitable[object]], *, version: int | None, phase: str
) -> dict[str, CheckpointEngineError]:
    """Wait for every call, failures or not, and return the failures by name. One slow member does not hide another."""
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    if not tasks:
        return {}
    try:
        await wait(tasks.values(), timeout=timeout_s)
    except asyncio.CancelledError:
        for task in tasks.values():
            task.cancel()
        raise
    failures: dict[str, CheckpointEngineError] = {}
    for name, task in tasks.items():
        if not task.done():
            task.cancel()
            message = f"not done within {timeout_s} s"
            failures[name] = TransportTimeout(message, version=version, phase=phase, member=name)
        elif (error := task.exception()) is not None:
            failures[name] = located(error, version=version, phase=phase, member=name)
    return failures


async def carried_through(work: Coroutine[Any, Any, T]) -> T:
    """Finish `work` even if this call is cancelled: ended halfway, it would leave replicas paused. The cancellation is
    raised after `work` has ended, a second one at once."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def located(error: BaseException, *, version: int | None, phase: str, member: str) -> CheckpointEngineError:
    """Convert `error` to a CheckpointEngineError with version, phase and member. Cancellation and exits are raised."""
    if not isinstance(error, Exception):
        raise error
    ours = as_ours(error)
    ours.version = version if ours.version is None else ours.version
    ours.phase = ours.phase or phase
    ours.member = ours.member or member
    return ours


def _who(tasks: Mapping[str, asyncio.Future[T]], timeout_s: float) -> str:
    waiting = ", ".join(name for name, task in tasks.items() if not task.done())
    done = ", ".join(name for name, task in tasks.items() if task.done()) or "none"
    return f"{waiting} not done within {timeout_s} s; done: {done}"
