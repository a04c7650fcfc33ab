"""Waiting for many, with a deadline, and able to say for whom."""

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
    """The results by member name. The first failure ends the wait at once; the other calls are cancelled.

    Raises the member's own CheckpointEngineError (completed with version, phase and member), what `located` makes of
    any other failure of a member, TransportTimeout that lists who is done and who is not when `timeout_s` have passed.
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
    """What would leave others paused, if it ended in the middle. A cancellation is raised when it has ended; another
    one at once."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def located(error: BaseException, *, version: int | None, phase: str, member: str) -> CheckpointEngineError:
    """`error` as one of ours that says where it happened. Cancellation and exits are not errors and pass through."""
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
