"""A program that runs agents, in an environment of its own: once for each sample, or once for all of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from verl.envs import of_a_program
from verl.experimental.agent_loop.errors import AgentCodeError
from verl.experimental.agent_loop.openai_endpoint import ModelAccess
from verl.utils.marked_processes import kill_marked

MOST_OUTPUT = 2**16
"""Characters of a program's output that are kept."""
LONGEST_LINE = 2**26
"""Bytes."""
KEPT_LINES = 20
MARK = "VERL_AGENT_PROGRAM"
"""Environment variable of a program and of all that it starts."""
END_WITHIN_S = 5.0
"""After a program's stdin was closed."""


async def run_once(command: str, access: ModelAccess, sample: Mapping[str, Any]) -> str:
    """The output of a program for one sample, which is JSON on its stdin. Raises AgentCodeError if it fails; nothing
    of it survives."""
    mark = uuid4().hex
    process = await _started(command, {**access.environment, MARK: mark})
    try:
        out, err = await process.communicate(json.dumps(sample).encode())
    finally:
        await _end(process, mark)
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        raise AgentCodeError(f"{command!r} ended with exit code {process.returncode}: {_last(lines)}")
    return out.decode(errors="replace")[-MOST_OUTPUT:]


class AgentProgram:
    """Runs the agents of many samples at once. One per event loop and command: see `program`.

    It reads lines of JSON on its stdin: {id, base_url, api_key, model, sample} asks for an agent, {id, cancel: true}
    ends one. It answers in any order, on stdout: {id, result} with what an agent's function would return, or
    {id, error}. It ends with its stdin. What it writes to stderr goes to the worker's.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._mark = uuid4().hex
        self._process: asyncio.subprocess.Process | None = None
        self._stdin: asyncio.StreamWriter | None = None
        """Of the last process."""
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._reading: list[asyncio.Task[None]] = []

    async def result(self, access: ModelAccess, sample: Mapping[str, Any]) -> Any:
        """Of one agent. Raises AgentCodeError for its error, and if the program ends; the next call starts it again."""
        async with self._starting:
            if self._process is None:
                await self._start()
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            place = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
            stdin = self._tell({"id": number, **place, "sample": sample})
            with contextlib.suppress(ConnectionError):  # `_answers` sees its end, too
                await stdin.drain()
            return await answer
        except asyncio.CancelledError:
            self._tell({"id": number, "cancel": True})  # without waiting: a program that hangs reads nothing
            raise
        finally:
            del self._asked[number]

    async def close(self) -> None:
        """End it. Agents under way fail."""
        if (process := self._process) is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_WITHIN_S)
        await _end(process, self._mark)
        await asyncio.gather(*self._reading)

    async def _start(self) -> None:
        self._said.clear()
        process = self._process = await _started(self._command, {MARK: self._mark})
        self._stdin = process.stdin
        self._reading = [asyncio.create_task(work) for work in (self._answers(process), self._errors(process))]

    def _tell(self, message: Mapping[str, Any]) -> asyncio.StreamWriter:
        assert self._stdin is not None
        self._stdin.write(json.dumps(message).encode() + b"\n")
        return self._stdin

    async def _answers(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        problem = ""
        try:
            while line := await process.stdout.readline():
                self._answer(line)
        except (ValueError, TypeError, RecursionError) as exc:  # of a line that is too long, too
            problem = f"answered what is no line of the protocol: {exc}"
        await _end(process, self._mark)
        await self._reading[1]
        self._process = None
        why = problem or f"ended with exit code {process.returncode}: {_last(list(self._said))}"
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(AgentCodeError(f"{self._command!r} {why}"))

    def _answer(self, line: bytes) -> None:
        """Raises ValueError for what is no answer."""
        said = json.loads(line)
        if not isinstance(said, dict) or not {"result", "error"} & said.keys():
            raise ValueError(f"{line[:200]!r} has no id with a result or an error")
        answer = self._asked.get(said.get("id", -1))
        if answer is None or answer.done():  # cancelled meanwhile
            return
        if "error" in said:
            answer.set_exception(AgentCodeError(str(said["error"])))
        else:
            answer.set_result(said["result"])

    async def _errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):
            while line := await process.stderr.readline():
                text = line.decode(errors="replace")
                sys.stderr.write(text)
                self._said.append(text.rstrip())


_programs: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, AgentProgram]] = WeakKeyDictionary()


def program(command: str) -> AgentProgram:
    """Of the running event loop."""
    known = _programs.setdefault(asyncio.get_running_loop(), {})
    return known.setdefault(command, AgentProgram(command))


async def close_programs() -> None:
    """Of the running event loop. They end with the worker's process, too."""
    known = _programs.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(one.close() for one in known.values()))


def words(command: str) -> list[str]:
    """`{python}` is this interpreter."""
    return [word.replace("{python}", sys.executable) for word in shlex.split(command)]


async def _started(command: str, variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Raises AgentCodeError for a program that is not there."""
    try:
        return await asyncio.create_subprocess_exec(
            *words(command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=of_a_program(variables),
            start_new_session=True,
            limit=LONGEST_LINE,
        )
    except OSError as exc:
        raise AgentCodeError(f"{command!r} cannot be started: {exc}") from exc


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """With all that it started, in whatever session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(kill_marked, MARK, mark)
    await process.wait()  # and for its pipes, which others may have inherited


def _last(lines: list[str]) -> str:
    return lines[-1] if lines else "it wrote nothing to stderr"
