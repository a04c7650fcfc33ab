"""The ranks of a collective call: which are present, the values that they exchange, and their failures.

Ranks meet in a torch.distributed store. Every collective call has a new session, so that entries of a failed one are
never taken for new. In a session each rank has one entry, which it keeps changing while it lives.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from ..compat.torch import PrefixStore, Store
from ..errors import CheckpointEngineError, TransportError, TransportTimeout, error_named
from ..links.rendezvous import Deadline
from ..plan.encoded import unpacked

PULSE_S = 0.2
HASTE_S = 0.005
"""The pause between reads of the entries while this rank waits for an answer."""
HASTE_PER_RANK_S = 0.0002
"""Every rank reads every entry each time, so with many ranks the pause is longer."""
SILENT_S = 15.0
"""A rank without a sign of life for this long is given up; a busy machine delays a thread for far less."""
QUIET_S = 1.5
"""Errors without a better explanation name ranks without a sign of life for this long."""

_PARTED = "parted"


class _Failure(msgspec.Struct, frozen=True):
    kind: str
    message: str
    origin: bool
    """It began there; else the rank only saw its connections break."""


class _Entry(msgspec.Struct, frozen=True):
    beat: int
    said: dict[str, bytes]
    failure: _Failure | None = None


class Roster:
    """One rank's view of one session. Its own thread uses the store, which may hang if its host does.

    All methods are called from one thread, except `fail`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        on_failure: Callable[[CheckpointEngineError], None] = lambda error: None,
    ) -> None:
        """`ranks`: all participants, `rank` among them; the first one opens the session. `on_failure` is called once,
        from another thread, when another rank has failed or is gone."""
        self.session = ""
        self.rank, self.ranks = rank, list(ranks)
        self.on_failure = on_failure
        self._failure: CheckpointEngineError | None = None
        self._said: dict[str, bytes] = {}
        self._own_failure: _Failure | None = None
        self._entries: dict[int, _Entry] = {}
        self._heard: dict[int, float] = {}
        """The time at which each rank's entry last changed."""
        self._came: set[int] = set()
        self._store: Any = store  # torch's annotations know no bytes
        self._place = f"roster/{'-'.join(map(str, self.ranks))}"
        self._haste_s = max(HASTE_S, len(self.ranks) * HASTE_PER_RANK_S)
        self._changed = threading.Condition()
        self._hasty = False
        self._left = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parameter-server-roster", daemon=True)

    # ------------------------------------------------------------------ the rank

    def meet(self, deadline: Deadline) -> None:
        """Wait until all ranks are present. Raises TransportTimeout naming the absent ones."""
        self._thread.start()
        with self._in_haste():
            while not self.session:
                self.check()
                if deadline.passed:
                    absent = ", ".join(f"rank {rank}" for rank in self.ranks if rank not in self._came)
                    came = ", ".join(f"rank {rank}" for rank in sorted(self._came)) or "none"
                    raise TransportTimeout(
                        f"{absent or 'the opening of the session'} not here within {deadline.timeout_s:.1f} s; "
                        f"here: {came}"
                    )
                self._wait(deadline)

    def exchange(self, topic: str, value: Any, deadline: Deadline) -> dict[int, Any]:
        """Publish `value` (for msgpack) under `topic`; return the values of all ranks under it, by rank. Collective.

        Raises the first failure of any rank, TransportTimeout naming the late ranks.
        """
        with self._changed:
            self._said[topic] = msgspec.msgpack.encode(value)
        self._news.set()
        with self._in_haste():
            while True:
                self.check()
                answers = {rank: entry.said[topic] for rank, entry in self._entries.items() if topic in entry.said}
                if len(answers) == len(self.ranks):
                    return {rank: unpacked(answers[rank], Any, f"an answer to '{topic}'") for rank in self.ranks}
                if deadline.passed:
                    late = ", ".join(f"rank {rank}" for rank in self.ranks if rank not in answers)
                    done = ", ".join(f"rank {rank}" for rank in sorted(answers)) or "none"
                    raise TransportTimeout(
                        f"{late} has not finished '{topic}' within {deadline.timeout_s:.1f} s; done: {done}"
                        + self.quiet()
                    )
                self._wait(deadline)

    def check(self) -> None:
        """Raises the failure of another rank, if there is one."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: CheckpointEngineError, *, origin: bool) -> CheckpointEngineError:
        """Publish this rank's failure. Returns the error that ends the call, if possible the same on all ranks.

        `origin`: the failure began on this rank; false if this rank only saw a connection break.
        """
        with self._changed:
            if self._own_failure is None:
                self._own_failure = _Failure(type(error).__name__, error.message, origin)
        self._news.set()
        until = time.monotonic() + (PULSE_S if origin else QUIET_S + PULSE_S)
        with self._in_haste(), self._changed:
            while time.monotonic() < until and self._left_to_hear(origin):
                self._changed.wait(self._haste_s)
        failure = self._first_failure()
        if failure is not None and failure[0] != self.rank:
            error, origin = _error_of(*failure), failure[1].origin
        if not origin or isinstance(error, TransportTimeout):
            error.message = error.message.removesuffix(self.quiet()) + self.quiet()
        error.member = error.member or f"rank {self.rank}"
        return error

    def has_told(self, error: CheckpointEngineError | None) -> bool:
        """Whether `error` is the failure that this roster received from another rank."""
        return error is not None and error is self._failure

    def quiet(self) -> str:
        """Names the silent ranks, for messages: `; no sign of life from rank 1`. Empty if all are alive."""
        now = time.monotonic()
        silent = [rank for rank, heard in self._heard.items() if rank != self.rank and now - heard > QUIET_S]
        return f"; no sign of life from {', '.join(f'rank {rank}' for rank in sorted(silent))}" if silent else ""

    def part(self) -> None:
        """Leave after success. The first rank leaves last, because its process may host the store."""
        with self._changed:
            self._said[_PARTED] = b""
        self._news.set()
        until = time.monotonic() + QUIET_S
        with self._in_haste(), self._changed:
            while self.rank == self.ranks[0] and time.monotonic() < until:
                if all(_PARTED in self._said_by(rank) for rank in self.ranks):
                    break
                self._changed.wait(self._haste_s)
        self.leave()

    def leave(self) -> None:
        """End the thread after it has written the last entry. Idempotent."""
        self._left.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(2 * PULSE_S)  # a store that hangs keeps it; it is a daemon

    def forget(self) -> None:
        """Drop the error, whose traceback refers to this roster. Called after `leave`."""
        self._failure = None
        self.on_failure = lambda error: None

    def _left_to_hear(self, origin: bool) -> bool:
        """Whether waiting may still bring a better explanation than one's own, or has to let it be written."""
        first = self._first_failure()
        written = self.rank in self._entries and self._entries[self.rank].failure is not None
        return not written or (not origin and (first is None or not first[1].origin))

    def _first_failure(self) -> tuple[int, _Failure] | None:
        """Of all failures known, one at its origin before one that followed, then the lowest rank's."""
        entries: Mapping[int, _Entry] = dict(self._entries)
        known = {rank: entry.failure for rank, entry in entries.items() if entry.failure is not None}
        if self._own_failure is not None:
            known[self.rank] = self._own_failure
        return min(known.items(), key=lambda item: (not item[1].origin, item[0]), default=None)

    def _wait(self, deadline: Deadline) -> None:
        with self._changed:
            self._changed.wait(min(PULSE_S, deadline.remaining_s))

    @contextmanager
    def _in_haste(self) -> Iterator[None]:
        self._hasty = True
        self._news.set()
        try:
            yield
        finally:
            self._hasty = False

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            if session := self._open_session():
                self._enter(session)
            beat = 0
            while self.session:
                beat += 1
                last = self._left.is_set()  # read before what is written: nothing said before is lost
                self._look(beat)
                if last:
                    return
                self._news.wait(self._haste_s if self._hasty else PULSE_S)
                self._news.clear()
        except TransportError as exc:  # of what somebody else wrote into the store
            self._note_failure(exc)
        except RuntimeError as exc:
            if not self._left.is_set():
                gone = TransportError(f"the ranks' shared store is gone ({exc}): its process has ended")
                self._note_failure(gone)

    def _open_session(self) -> str:
        """Call, and go where the first rank leads: to the session that answers this very call. Empty if it left."""
        call = secrets.token_hex(8)
        own = f"{self._place}/call/{self.rank}"
        self._store.set(own, call)
        try:
            while not self._left.is_set():
                calls = self._calls()
                if self.rank == self.ranks[0] and len(calls) == len(self.ranks):
                    opened = msgspec.msgpack.encode((secrets.token_hex(8), calls))
                    self._store.set(f"{self._place}/session", opened)
                if self._store.check([f"{self._place}/session"]):
                    data = self._store.get(f"{self._place}/session")
                    session, answered = unpacked(data, tuple[str, dict[int, str]], "a session of these ranks")
                    if answered.get(self.rank) == call:
                        return session
                self._left.wait(self._haste_s)
        finally:
            with suppress(RuntimeError):
                self._store.set(own, "")
        return ""

    def _calls(self) -> dict[int, str]:
        keys = {rank: f"{self._place}/call/{rank}" for rank in self.ranks}
        there = {rank: _text(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        calls = {rank: call for rank, call in there.items() if call}
        with self._changed:
            self._came |= calls.keys()  # also one whose patience has ended by now: it was here
            self._changed.notify_all()
        return calls

    def _enter(self, session: str) -> None:
        former = f"{self._place}/former/{self.rank}"
        if self._store.check([former]):  # everybody has left that session, or nobody would have called again
            self._store.delete_key(f"{_text(self._store.get(former))}/{self.rank}")
        self._store.set(former, session)
        self._store = PrefixStore(session, self._store)
        self._heard = dict.fromkeys(self.ranks, time.monotonic())
        with self._changed:
            self.session = session
            self._changed.notify_all()

    def _look(self, beat: int) -> None:
        """Write one's own entry and read those of the others."""
        with self._changed:
            own = _Entry(beat, dict(self._said), self._own_failure)
        self._store.set(str(self.rank), msgspec.msgpack.encode(own))
        absent = [rank for rank in self.ranks if rank not in self._entries]
        there = {rank for rank in absent if self._store.check([str(rank)])} | self._entries.keys()
        others = sorted(there - {self.rank})
        data = self._store.multi_get([str(rank) for rank in others]) if others else []
        what = "the entry of a rank of this session"
        read = {rank: unpacked(entry, _Entry, what) for rank, entry in zip(others, data, strict=True)}
        now = time.monotonic()
        with self._changed:
            for rank, entry in (read | {self.rank: own}).items():
                if rank not in self._entries or self._entries[rank].beat != entry.beat:
                    self._heard[rank] = now
                self._entries[rank] = entry
            self._changed.notify_all()
        self._judge(now)

    def _judge(self, now: float) -> None:
        failure = self._first_failure()
        if failure is not None and failure[0] != self.rank:
            self._note_failure(_error_of(*failure))
        for rank, heard in self._heard.items():
            if rank != self.rank and now - heard > SILENT_S and _PARTED not in self._said_by(rank):
                self._note_failure(TransportError(f"no sign of life for {SILENT_S:.0f} s", member=f"rank {rank}"))

    def _said_by(self, rank: int) -> dict[str, bytes]:
        return self._entries[rank].said if rank in self._entries else {}

    def _note_failure(self, error: CheckpointEngineError) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = error
            self._changed.notify_all()
        if self._own_failure is None:
            self.on_failure(error)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise TransportError(f"the ranks' shared store holds something that no rank wrote: {exc}") from exc


def _error_of(rank: int, failure: _Failure) -> CheckpointEngineError:
    """The failure of another rank as it was there."""
    return error_named(failure.kind)(failure.message, member=f"rank {rank}")
