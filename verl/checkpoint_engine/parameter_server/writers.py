"""The writer of a server, and the reports of its workers on their last load. No torch.

A server has one writer at a time. Each of its workers has a `Ledger` with the last load and the writer's claim. The
claim ends when it is released, when it is not renewed in time, or when the writer's process is gone. Writers send an
`Order` to all workers at once and trust their `Answer`s, not the status of a request.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import ActivationError, ConfigError

RESCUE = "rescue after the "
"""The prefix of a rescue's name, before that of the dead writer."""
LEASE_S = 60.0
"""The life of a claim that is not renewed."""


class Writer(msgspec.Struct, frozen=True):
    """One publisher, or one run of `update`."""

    id: str
    who: str
    """Its description, for messages."""
    machine: str
    """The boot id of its host and its pid namespace, in which `pid` is valid; empty: unknown."""
    pid: int
    started: str
    """The start time of its process: another process may reuse its pid."""
    rescues: bool = False
    """Whether it is a rescue of a dead writer's servers, which ends soon."""

    @classmethod
    def here(cls, kind: str) -> Writer:
        """A writer in this process, of a `kind` such as `publisher`."""
        pid = os.getpid()
        who = f"{kind} of process {pid} on {socket.gethostname()}"
        return cls(secrets.token_hex(8), who, _machine(), pid, _started(pid))

    def rescuer(self) -> Writer:
        """The rescue that takes over this writer's claims after its process has ended."""
        return Writer(self.id, f"{RESCUE}{self.who}", machine="", pid=0, started="", rescues=True)

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended; false if it is on another machine."""
        return bool(self.machine) and self.machine == _machine() and _started(self.pid) != self.started


def _machine() -> str:
    """Empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """In ticks since the machine's start; empty if there is no such process, or it is one that has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


class Order(msgspec.Struct, frozen=True):
    """A writer's request to every worker."""

    number: str
    """The answer repeats it, so that a late answer to another order is recognised."""
    act: Literal["look", "claim", "release"]
    writer: Writer | None = None


class Answer(msgspec.Struct, frozen=True):
    number: str
    rank: int
    server: str
    """The identity of this worker process."""
    active: bool
    """Whether an update has begun and not ended."""
    load: str
    """The identity of the last update; empty before the first, and after a failed one."""
    version: int | None
    digest: str
    """The digest of that version, if it came from an arena."""
    claimed_by: Writer | None
    refuses: str
    """Why no update can be loaded; empty if one can."""
    torn: bool = False
    """Whether a load has begun and not succeeded, so that the weights may be mixed."""
    copies: dict[str, str] = {}
    """Of the tensors last compared with the model: each without a place in it, with the twin that the model uses, such
    as the embedding for a head. Their values must be equal."""


class Ledger:
    """The claim and the last load of one worker."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._server = secrets.token_hex(8)
        self._claim: tuple[Writer, float] | None = None
        self._version: int | None = None
        self._load = self._digest = ""
        self._torn = False

    @property
    def holder(self) -> Writer | None:
        """The writer that has a valid claim, or None."""
        if self._claim is not None and (self._now() >= self._claim[1] or self._claim[0].is_gone):
            self._claim = None
        return self._claim[0] if self._claim is not None else None

    def is_free_for(self, writer: str | None) -> bool:
        holder = self.holder
        return holder is None or holder.id == writer

    def require(self, writer: str | None) -> None:
        """Raises ActivationError if another writer than `writer` has claimed the server."""
        holder = self.holder
        if holder is not None and holder.id != writer:
            raise ActivationError(f"the server is being written by the {holder.who}")

    def begin_load(self) -> None:
        """Mark the weights as torn, until `loaded`."""
        self._load, self._version, self._digest, self._torn = "", None, "", True

    def loaded(self, load: str, version: int | None, digest: str) -> None:
        """Record a load. Called on every rank after all have loaded."""
        self._load, self._version, self._digest, self._torn = load, version, digest, False

    def answer(
        self, order: str, *, rank: int, active: bool, refuses: str, copies: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Answer an `Order` in JSON; it may change the claim."""
        asked = msgspec.json.decode(order, type=Order)
        holder, writer = self.holder, asked.writer
        if writer is not None and (holder is None or holder.id == writer.id):
            if asked.act == "claim":
                self._claim = writer, self._now() + LEASE_S
            elif asked.act == "release":
                self._claim = None
        answer = Answer(
            number=asked.number,
            rank=rank,
            server=self._server,
            active=active,
            load=self._load,
            version=self._version,
            digest=self._digest,
            claimed_by=self.holder,
            refuses=refuses,
            torn=self._torn,
            copies=dict(copies or {}),
        )
        found: dict[str, Any] = msgspec.to_builtins(answer)
        return found


def order(act: Literal["look", "claim", "release"], writer: Writer | None = None) -> Order:
    return Order(secrets.token_hex(8), act, writer)


def answers_to(order: Order, said: object, url: str) -> Sequence[Answer]:
    """Decode the workers' answers of the server at `url`. Raises ActivationError if one does not answer `order`."""
    lags = isinstance(said, list) and None in said  # what calls that return nothing have left
    try:
        answers = msgspec.convert(said, list[Answer]) if not lags else []
    except msgspec.ValidationError as exc:
        raise ActivationError(f"the workers of {url} do not report their version: {said!r:.300}", member=url) from exc
    if not answers or any(answer.number != order.number for answer in answers):
        raise ActivationError(
            f"the workers of {url} return the answer of an earlier call: a refused call left answers unread. "
            "Restart the server",
            member=url,
        )
    return answers


def require_own(answers: Sequence[Answer], writer: Writer, url: str) -> None:
    """Raises ConfigError if another writer has claimed the server, or it accepts no updates."""
    if refuses := next((answer.refuses for answer in answers if answer.refuses), ""):
        raise ConfigError(f"the engine at {url} takes no weights: {refuses}", member=url)
    others = [answer.claimed_by for answer in answers if answer.claimed_by and answer.claimed_by.id != writer.id]
    if others:
        raise ConfigError(
            f"the server at {url} belongs to another publisher: the {others[0].who}. Close that one first. If it is "
            f"gone, its claim ends within {LEASE_S:g} s",
            member=url,
        )


def require_whole(answers: Sequence[Answer], url: str) -> None:
    """Raises ActivationError if a load has failed and none has succeeded since."""
    if any(answer.torn for answer in answers):
        raise ActivationError(f"what {url} holds is torn by a load that failed: it stays paused until one succeeds")


def require_loaded(answers: Sequence[Answer], load: str, version: int | None, url: str) -> None:
    """Raises ActivationError unless every worker reports `load` and `version`, with the same digest on all."""
    late = [str(answer.rank) for answer in answers if answer.load != load or answer.version != version]
    if late or len({answer.digest for answer in answers}) != 1:
        named = f"ranks {', '.join(late)} have not" if late else "ranks have not all"
        raise ActivationError(f"{named} loaded the version of {url}, though it did not refuse", member=url)
