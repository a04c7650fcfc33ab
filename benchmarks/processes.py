"""Objects that live in processes of their own, without Ray: their methods are called over a pipe."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from inspect import iscoroutinefunction
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from benchmarks.namespaces import Host
from verl.checkpoint_engine.errors import TransportError

IMPORTS = ["benchmarks.fleet", "benchmarks.parameter_server", "benchmarks.peers", "benchmarks.raw"]


class Member:
    """`make()`, in a process of its own: a port to whatever methods the object has. `end` it; it ends with this one.

    Coroutines run there at once, side by side. Other methods run one after the other on a thread of their own, as a
    trainer trains while the calls of a sync are answered. Here every method is a coroutine; `call` and `submit` are for
    those who have no loop. All raise what the method raises, and TransportError when the process is gone. A coroutine
    whose call is cancelled is cancelled there.
    """

    leaves_within_s = 10.0
    """When it is told to end; then it is killed."""

    def __init__(
        self,
        name: str,
        make: Callable[[], object],
        *,
        host: Host | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """The process lives at `host`. One with an `environment` is fresh, so that the C library reads that.

        Others are forked from a server that has imported what all need, which takes milliseconds and not seconds.
        """
        self.name = name
        self._beginning = (make, host)
        self._environment = environment
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if self._environment is None else "spawn")
        context.set_forkserver_preload(IMPORTS)
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, *self._beginning), name=self.name, daemon=True)
        with patch.dict(os.environ, self._environment or {}):
            self._process.start()
        its_end.close()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, name=self.name, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def submit(self, method: str, *arguments: Any, **options: Any) -> Future[Any]:
        return self._submit(next(self._numbers), method, arguments, options)

    def _submit(self, number: int, *call: Any) -> Future[Any]:
        answer = self._answers[number] = Future()
        try:
            self._pipe.send((number, *call))
        except OSError as exc:
            raise TransportError("its process is gone", member=self.name) from exc
        return answer

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self.submit(method, *arguments, **options).result()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*arguments: Any, **options: Any) -> Any:
            number = next(self._numbers)
            try:
                return await asyncio.wrap_future(self._submit(number, method, arguments, options))
            except asyncio.CancelledError:
                with suppress(OSError):
                    self._pipe.send((number, None, (), {}))
                raise

        return call

    def _read(self) -> None:
        """On a thread of its own: hand answers to those who wait for them."""
        try:
            while True:
                number, result, error = self._pipe.recv()
                answer = self._answers.pop(number)
                if not answer.set_running_or_notify_cancel():
                    continue
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)
        except (EOFError, OSError):
            for answer in list(self._answers.values()):
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(TransportError("its process is gone", member=self.name))

    def replace(self) -> None:
        """Another process takes the place of this one."""
        self.end()
        self._start()

    def end(self) -> None:
        """Idempotent."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(self.leaves_within_s)
        if self._process.is_alive():
            self._process.kill()
        self._reader.join(self.leaves_within_s)
        self._pipe.close()


def _serve(pipe: Connection, make: Callable[[], object], host: Host | None) -> None:
    if host is not None:
        host.enter()
    asyncio.run(_answer_all(pipe, make()))


async def _answer_all(pipe: Connection, member: object) -> None:
    """Until the other end says goodbye or closes. What libraries have left running does not hold the process up."""
    trains, reads = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("trains", "reads"))
    calls: dict[int, asyncio.Task[None]] = {}
    loop = asyncio.get_running_loop()

    async def answer(number: int, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            method = getattr(member, name)
            if iscoroutinefunction(method):
                result = await method(*arguments, **options)
            else:
                result = await loop.run_in_executor(trains, partial(method, *arguments, **options))
            pipe.send((number, result, None))
        except Exception as exc:  # noqa: BLE001 - whatever it is belongs to the caller
            pipe.send((number, None, exc))  # and is not kept here: it holds what its traceback holds
        finally:
            del calls[number]

    while (call := await loop.run_in_executor(reads, _received, pipe)) is not None:
        number, name, *rest = call
        if name is not None:
            calls[number] = asyncio.create_task(answer(number, name, *rest))
        elif number in calls:
            calls[number].cancel()
    os._exit(0)


def _received(pipe: Connection) -> Any:
    """A number, the name of a method (None: that call is cancelled) and its arguments; None: goodbye."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


@contextmanager
def members(
    makers: Mapping[str, Callable[[], object]], hosts: Sequence[Host | None] | None = None
) -> Iterator[list[Member]]:
    """One for each name, at the host in the same place; they end with the block."""
    started = []
    try:
        for (name, make), host in zip(makers.items(), hosts or [None] * len(makers), strict=True):
            started.append(Member(name, make, host=host))
        yield started
    finally:
        for member in started:
            member.end()
