"""What servers have sampled of the calls under way, in shared memory of the host: a killed server leaves it there.

    /dev/shm/verl-calls-a1b2c3d4/    0700; of one agent-loop worker, whose janitor removes it
        lock                         flock'ed by the worker
        7                            0600; the server appends what it has sampled of a call (`verl.utils.framed`)

The worker makes the file of a call, and removes it with the answer. A server on another host finds none.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from verl.checkpoint_engine.memory.janitor import Janitor, sweep
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.support.files import open_regular
from verl.utils.framed import framed, frames
from verl.workers.rollout.records import TokenOutput, WeightVersionSpan

logger = logging.getLogger(__name__)

PREFIX = "verl-calls-"
EVERY_S = 0.005
"""Between two looks at what an engine has sampled: so much is lost with its server."""
SHARE = 50
"""Between them, the pause is at least so many times as long as the last look took: a server has other work."""
MOST_NBYTES = 2**28
"""Of a server's calls under way. What is sampled beyond it is lost with the server."""


class CallDirectory:
    """The files of one worker's calls. It owns them; they are removed when its process ends, even if killed."""

    def __init__(self) -> None:
        """Raises OSError."""
        sweep(envs.shm_dir(), PREFIX)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=envs.shm_dir()))
        self._lock = (self.path / "lock").open("w", encoding="utf-8")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._janitor = Janitor(self.path)
        self._names = itertools.count()

    def close(self) -> None:
        self._janitor.close()
        self._lock.close()

    @contextmanager
    def reading(self) -> Iterator[ReadCall]:
        """The file of a call that is to be made, within the block. Raises OSError."""
        path = self.path / str(next(self._names))
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            yield ReadCall(path, descriptor)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)


class ReadCall:
    """The worker's side of one call's file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._file = os.fdopen(descriptor, "rb", closefd=False)
        self._end = 0

    @property
    def is_written(self) -> bool:
        """Whether a server has opened it."""
        return os.fstat(self._file.fileno()).st_size > 0

    def new_parts(self) -> list[TokenOutput]:
        """What follows the parts of the last time, up to the first one that is not whole."""
        if os.fstat(self._file.fileno()).st_size <= self._end:
            return []
        self._file.seek(self._end)
        parts = []
        for _, payload, end in frames(self._file):
            self._end = end
            if payload:
                parts.append(_unpacked(payload))
        return parts


@dataclass(slots=True)
class _WrittenCall:
    """The server's side."""

    descriptor: int
    num_tokens: int = 0
    nbytes: int = 0
    is_broken: bool = False
    """Nothing more is written."""


class WrittenCalls:
    """A server's calls that have a file. State of the engine loop."""

    def __init__(self, so_far: Callable[[str, int], TokenOutput | None]) -> None:
        """`so_far`: see `TellingEngine`, with the replica's name."""
        self._so_far = so_far
        self._calls: dict[str, _WrittenCall] = {}
        self._looking: asyncio.Task[None] | None = None
        self._nbytes = 0

    @contextmanager
    def during(self, request_id: str, path: Path) -> Iterator[Callable[[TokenOutput], None]]:
        """Around a call. What this yields is called with its answer, which is written, too: it may not arrive."""
        try:
            descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND)
        except OSError:  # that of a worker on another host, or which is gone
            yield lambda answer: None
            return
        call = self._calls[request_id] = _WrittenCall(descriptor)
        self._append(call)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield lambda answer: self._write(call, _after(answer, call.num_tokens))
        finally:
            del self._calls[request_id]
            self._nbytes -= call.nbytes
            os.close(descriptor)

    async def _look(self) -> None:
        pause_s = EVERY_S
        while self._calls:
            await asyncio.sleep(pause_s)
            began_s = time.thread_time()
            for request_id, call in self._calls.items():
                if not call.is_broken and (part := self._so_far(request_id, call.num_tokens)) is not None:
                    self._write(call, part)
            pause_s = max(SHARE * (time.thread_time() - began_s), EVERY_S)

    def _write(self, call: _WrittenCall, part: TokenOutput) -> None:
        self._append(call, _packed(part))
        call.num_tokens += len(part.token_ids)

    def _append(self, call: _WrittenCall, payload: bytes = b"") -> None:
        """Nothing after a record that is not whole."""
        record = framed({}, payload)
        if call.is_broken or self._nbytes + len(record) > MOST_NBYTES:
            call.is_broken = True
            return
        try:
            call.is_broken = os.write(call.descriptor, record) < len(record)
        except OSError as exc:
            logger.warning("tokens of a call under way are not written to shared memory: %s", exc)
            call.is_broken = True
        call.nbytes += len(record)
        self._nbytes += len(record)


def _after(answer: TokenOutput, known: int) -> TokenOutput:
    """Without the first `known` tokens, and their experts."""
    if not known:
        return answer
    routes = answer.routed_experts
    spans = (
        replace(span, start=max(span.start - known, 0), stop=span.stop - known)
        for span in answer.weight_versions
        if span.stop > known
    )
    return replace(
        answer,
        token_ids=answer.token_ids[known:],
        log_probs=None if answer.log_probs is None else answer.log_probs[known:],
        routed_experts=None if routes is None else routes[len(routes) - (len(answer.token_ids) - known) :],
        weight_versions=tuple(spans),
    )


def _packed(part: TokenOutput) -> bytes:
    routes = part.routed_experts
    shape = None if routes is None else (routes.dtype.str, routes.shape, routes.tobytes())
    spans = [astuple(span) for span in part.weight_versions]
    counts = (part.cache, part.cached_tokens, part.reusable, part.computed_again)
    return msgspec.msgpack.encode((part.token_ids, part.log_probs, part.stop_reason, spans, shape, counts, part.seen))


def _unpacked(payload: bytes) -> TokenOutput:
    token_ids, log_probs, reason, spans, shape, counts, seen = msgspec.msgpack.decode(payload)
    routes: Any = None if shape is None else np.frombuffer(shape[2], shape[0]).reshape(shape[1])
    versions = tuple(WeightVersionSpan(*span) for span in spans)
    cache, cached_tokens, reusable, again = counts
    return TokenOutput(
        token_ids, log_probs, reason, versions, routes, cache, cached_tokens, reusable, again, seen=tuple(seen)
    )
