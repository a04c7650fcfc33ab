"""What an agent-loop worker knows of its tools' calls, in a file that outlives it: none is executed twice.

    <output_dir>/tool_calls/    0700
        0.calls                 0600; of worker 0: records in the order of writing

A loop that is run again, after its worker or a server died, makes its calls again. A call that was answered has that
answer. One that had begun in this process is waited for. One that had begun in a process that died is executed again
only if its tool is idempotent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import uuid
from array import array
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.trainer.plain_state import packed, unpacked
from verl.utils.config import ConfigError
from verl.utils.framed import append, cut_to_whole, framed, frames

logger = logging.getLogger(__name__)

MOST_NBYTES = 64 << 20
"""Of answers that are kept, per worker. Of a call beyond them only its beginning is known."""
_REWRITTEN_NBYTES = 1 << 20
"""A file is written anew, without what is forgotten, when it has this much more than twice what it had then."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a call has led to."""

    content: str | list[dict[str, Any]]
    """Of the message that the model is shown."""
    rewards: list[float] = field(default_factory=list)
    scores: Mapping[str, float] = field(default_factory=dict)
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """These three are what the tool added to its sample's `AgentData`."""


Work = Callable[[], Awaitable[ToolAnswer]]


class ToolCalls:
    """Those of one worker: on its event loop, but for its file, which one thread writes.

    Without records, or if they cannot be written, calls are executed all the same: a run does not depend on them.
    """

    def __init__(self, path: Path | None, *, takes_over: bool = False) -> None:
        """`takes_over`: a worker that died may have left its file. Else a file there is an earlier driver's: see
        `resume`. Without a `path` calls are known within this process alone."""
        self._file, self._takes_over = path, takes_over
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tool-calls")
        self._opening: asyncio.Future[None] | None = None
        self._run = uuid.uuid4().hex
        """Part of every key: other runs have other ones, for the same conversation."""
        self._known: dict[str, dict[str, bytes | None]] = {}
        """By uid and key: the answer; None of a call that has only begun."""
        self._nbytes = 0
        """Of the answers that are known."""
        self._written = self._rewritten = 0
        """The size of the file, now and when it was last written anew."""
        self._running: dict[str, asyncio.Task[ToolAnswer]] = {}
        self._is_full, self._is_over = False, path is None

    def of(self, uid: str | None, sample: Hashable) -> SampleCalls:
        """Those of the sample with that name, of a prompt with that uid. Without a uid nobody asks for it again."""
        return SampleCalls(self, uid, sample)

    async def name(self, *parts: Hashable) -> str:
        """32 hexadecimal digits: the same for these parts in each attempt of this run, and for nothing else."""
        await self.opened()
        return hashlib.sha256(repr((self._run, *parts)).encode()).hexdigest()[:32]

    async def answer(self, uid: str | None, key: str, *, idempotent: bool, execute: Work, outcome: Work) -> ToolAnswer:
        """See `SampleCalls.answer`."""
        call = self._running.get(key)
        if call is None:
            call = asyncio.create_task(self._answered(uid, key, idempotent, execute, outcome))
            self._running[key] = call
            call.add_done_callback(lambda done: self._done(uid, key, done))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if idempotent or uid is None:
                call.cancel()
            raise

    def _done(self, uid: str | None, key: str, call: asyncio.Task[ToolAnswer]) -> None:
        if call.cancelled() or call.exception() is None or uid is None:  # an error comes again in the next attempt
            self._running.pop(key, None)

    async def _answered(self, uid: str | None, key: str, idempotent: bool, execute: Work, outcome: Work) -> ToolAnswer:
        if uid is None:
            return await execute()
        await self.opened()
        known = self._known.setdefault(uid, {})
        has_begun = key in known
        if (payload := known.get(key)) is not None:
            with suppress(ConfigError):  # a picture's file is gone
                return ToolAnswer(*unpacked(payload))
        if has_begun and not idempotent:
            answer = await outcome()
        else:
            if not idempotent:
                await self._note(uid, key, None)
            answer = await execute()
        with suppress(TypeError):  # extra fields that are not plain: as if it had not been answered
            content = (answer.content, answer.rewards, dict(answer.scores), dict(answer.extra_fields))
            await self._note(uid, key, packed(content))
        return answer

    async def forget(self, uids: Collection[str]) -> None:
        """Nobody will ask for these samples again."""
        for uid in uids:
            for key, payload in self._known.pop(uid, {}).items():
                self._nbytes -= len(payload or b"")
                self._running.pop(key, None)
        if self._written > 2 * self._rewritten + _REWRITTEN_NBYTES:
            await self._in_thread(self._rewrite, self._records())

    async def _note(self, uid: str, key: str, payload: bytes | None) -> None:
        """In memory and in the file."""
        if (known := self._known.get(uid)) is None:  # forgotten meanwhile
            return
        if payload is not None and self._nbytes + len(payload) > MOST_NBYTES:
            if not self._is_full:
                logger.warning("answers of tools under way take over %d MiB: others are not kept", MOST_NBYTES >> 20)
            self._is_full, payload = True, None
        if key in known and payload is None:
            return
        known[key] = payload
        self._nbytes += len(payload or b"")
        await self._in_thread(self._append, _record(uid, key, payload))

    def _records(self) -> bytes:
        return b"".join(
            _record(uid, key, payload) for uid, known in self._known.items() for key, payload in known.items()
        )

    async def opened(self) -> None:
        """Return once it is known what a worker that died has left."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._in_thread(self._open))
        await asyncio.shield(self._opening)

    async def _in_thread(self, work: Callable[..., None], *args: Any) -> None:
        if self._is_over:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        except OSError as exc:
            self._is_over = True
            logger.warning("calls of tools may be repeated after a worker's death: %s", exc)

    async def resume(self) -> None:
        """Go on with what the worker of this rank had when its driver died. Nothing is called meanwhile."""
        await self.opened()
        await self._in_thread(self._resume)

    # ---- on the thread of the file

    @property
    def _path(self) -> Path:
        assert self._file is not None
        return self._file

    def _open(self) -> None:
        if self._takes_over and self._path.exists():
            self._read(self._path)
        else:
            if self._takes_over:
                logger.warning(
                    "%s is not on this host: what tools had begun in a worker that died is executed again; let all "
                    "hosts share trainer.default_local_dir",
                    self._path,
                )
            with suppress(FileNotFoundError):
                os.replace(self._path, self._before)
            append(self._path, b"", {"run": self._run})

    def _resume(self) -> None:
        if self._before.exists():
            self._read(self._before)
            self._rewrite(self._records())
            self._before.unlink()

    @property
    def _before(self) -> Path:
        return self._path.with_suffix(".before")

    def _read(self, path: Path) -> None:
        cut_to_whole(path)
        with path.open("rb") as file:
            for head, payload, end in frames(file):
                if "run" in head:
                    self._run = head["run"]
                else:
                    self._known.setdefault(head["uid"], {})[head["key"]] = payload if head["answered"] else None
                self._written = end
        self._nbytes = sum(len(payload or b"") for known in self._known.values() for payload in known.values())

    def _append(self, record: bytes) -> None:
        append(self._path, record, {"run": self._run})
        self._written += len(record)

    def _rewrite(self, records: bytes) -> None:
        whole = framed({"run": self._run}) + records
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        append(new, records, {"run": self._run})
        os.replace(new, self._path)
        self._written = self._rewritten = len(whole)


@dataclass(frozen=True, slots=True)
class SampleCalls:
    """Those of one sample."""

    _calls: ToolCalls
    _uid: str | None
    _sample: Hashable

    async def request_id(self) -> str:
        """Of the sample, for its tools: the same in each attempt."""
        return uuid.uuid4().hex if self._uid is None else await self._calls.name(self._sample)

    async def key(self, context: Sequence[int], number: int) -> str:
        """The idempotency key of a call: the same in each attempt at it, and in no other call.

        It is the `number`-th call of the message with which `context` ends, all tokens of the conversation so far.
        """
        if self._uid is None:
            return uuid.uuid4().hex
        return await self._calls.name(self._sample, hashlib.sha256(array("q", context).tobytes()).hexdigest(), number)

    async def answer(self, key: str, *, idempotent: bool, execute: Work, outcome: Work) -> ToolAnswer:
        """The answer of a call: from an earlier attempt, or of `execute`; or of `outcome` if a process died while it
        executed it, and it is not `idempotent`.

        If this is cancelled, a call that is not idempotent goes on, for the next attempt.
        """
        return await self._calls.answer(self._uid, key, idempotent=idempotent, execute=execute, outcome=outcome)


UNNAMED = ToolCalls(None).of(None, None)
"""Of a loop that no worker runs."""


def _record(uid: str, key: str, payload: bytes | None) -> bytes:
    return framed({"uid": uid, "key": key, "answered": payload is not None}, payload or b"")
