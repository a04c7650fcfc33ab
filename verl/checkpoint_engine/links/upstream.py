"""The page that a forwarding node shows to the next, and the reader that reads from owners and that node at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import TransportError, TransportTimeout
from ..plan.layout import align
from ..plan.shards import Int64s
from ..plan.types import Member, Range
from .cuts import UPSTREAM
from .fetch import STOPPED_S
from .wire import UInt8s, Wire, WireReader


class Endpoint(msgspec.Struct, frozen=True):
    """The content of a node's `Member.address` if nodes forward, as JSON."""

    wire: bytes
    page: int
    page_nbytes: int


class Page:
    """[publication, address of the slot, bytes of the wire's address], the wire's address, one byte per part, [code of
    the member that the node waits for].

    The page has the wire's address, because that may change when memory is registered.
    """

    HEADER = 24
    MAX_ADDRESS = 2**16
    PARTS = HEADER + MAX_ADDRESS
    WORD = 8
    EMPTY = 0
    """No publication; as a code: the node waits for no member."""

    def __init__(self, num_parts: int) -> None:
        self.bytes: UInt8s = np.zeros(self.PARTS + align(num_parts) + self.WORD, np.uint8)

    @property
    def words(self) -> Int64s:
        return self.bytes[: self.HEADER].view(np.int64)

    @property
    def parts(self) -> UInt8s:
        return self.bytes[self.PARTS : -self.WORD]

    @property
    def awaited(self) -> Int64s:
        """One word, the code of a member: 1 + index of a trainer rank, -(1 + index) of a node, or `EMPTY`."""
        return self.bytes[-self.WORD :].view(np.int64)

    @property
    def wire(self) -> bytes:
        return self.bytes[self.HEADER : self.HEADER + int(self.words[2])].tobytes()

    def write(self, publication: int, slot: int, wire: bytes, ready: npt.NDArray[np.bool_]) -> None:
        if len(wire) > self.MAX_ADDRESS:
            raise TransportError(f"the address of the wire has {len(wire)} bytes, more than {self.MAX_ADDRESS}")
        self.words[0] = self.awaited[0] = self.EMPTY
        self.parts[: len(ready)] = ready
        self.bytes[self.HEADER : self.HEADER + len(wire)] = np.frombuffer(wire, np.uint8)
        self.words[1:] = slot, len(wire)
        self.words[0] = publication


def publication_of(stamps: Int64s) -> int:
    """A digest of the stamps of all owners, never `Page.EMPTY`: two nodes with the same one read the same bytes."""
    return (xxhash.xxh3_64_intdigest(stamps.tobytes()) >> 1) | 1


LOOK_S = 0.001
"""The pause between reads of the upstream node's page, if the wire does not `tell`."""


@dataclass
class UpstreamReader:
    """The `RangeReader` of one publication from owners and from the upstream node."""

    learn: Callable[[Wire, bytes], None]
    """Called with the wire and the address in the page, which may have changed."""
    owners: WireReader
    member: Member
    endpoint: Endpoint
    copy: Page
    publication: int
    _slot_address: int | None = None
    _look: Any = None
    """The read of the page that is under way."""
    _next_look_s: float = 0.0

    def __post_init__(self) -> None:
        self._nothing = np.zeros_like(self.copy.parts)

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> tuple[int, Any]:
        if owner != UPSTREAM:
            return owner, self.owners.start(owner, ranges, bounce=bounce)
        assert self._slot_address is not None
        (part,) = ranges
        target = self.owners.slot.ctypes.data + part.dst_offset
        with self._located():
            return owner, self._wire.read(UPSTREAM, self._slot_address + part.src_offset, target, part.nbytes)

    def is_done(self, transfer: tuple[int, Any]) -> bool:
        owner, handle = transfer
        if owner != UPSTREAM:
            return self.owners.is_done(handle)
        with self._located():
            return self._wire.is_done(handle)

    def wait(self, timeout_s: float) -> None:
        self.owners.wait(timeout_s)

    def cancel(self, transfer: tuple[int, Any]) -> None:
        """Does nothing: after a failure the engine abandons the wire and with it all transfers."""

    def there(self) -> UInt8s:
        """One byte per part: not 0 if the upstream node holds it, by the last page read. Starts a new read if due."""
        with self._located():
            self._learn()
        return self.copy.parts if self._slot_address is not None else self._nothing

    def blamed(self, owner: int) -> int:
        """The member that `owner` waits for, by its page, or `owner` itself; as a code of `Page.awaited`."""
        if owner != UPSTREAM:
            return 1 + owner
        if self._slot_address is not None and self.copy.awaited[0] != Page.EMPTY:
            return int(self.copy.awaited[0])
        return -(1 + self.member.index)

    def check(self, deadline: float) -> None:
        """Raises TransportError if the upstream node does not hold the publication any more."""
        with self._located():
            handle = self._wire.read(*self._span(0, Page.HEADER))
            while not (is_done := self._wire.is_done(handle)) and time.monotonic() < deadline:
                self.wait(STOPPED_S)
        if not is_done:
            raise TransportTimeout("it cannot be read", version=self._version, phase="stage", member=self.member.name)
        if self.copy.words[0] != self.publication:
            raise self._error("it received other bytes while it was read")

    def _learn(self) -> None:
        """What the page says, if it has arrived."""
        if self._look is None:
            if time.monotonic() >= self._next_look_s:
                begun = self._slot_address is not None
                # The parts are read only after the publication has been seen: before, they may be another's.
                span = (Page.PARTS, self.endpoint.page_nbytes) if begun else (0, Page.PARTS)
                self._look = self._wire.watch(*self._span(*span))
        elif self._wire.is_done(self._look):
            self._look = None
            self._next_look_s = 0.0 if self._wire.tells else time.monotonic() + LOOK_S
            if self._slot_address is None and self.copy.words[0] == self.publication:
                self.copy.parts[:] = 0
                self.copy.awaited[0] = Page.EMPTY
                self.learn(self._wire, self.copy.wire)
                self._slot_address = int(self.copy.words[1])
                self._next_look_s = 0.0

    @property
    def _wire(self) -> Wire:
        return self.owners.wire

    @property
    def _version(self) -> int:
        return self.owners.version

    def _span(self, low: int, high: int) -> tuple[int, int, int, int]:
        """Of the page of the node before, and of its copy."""
        return UPSTREAM, self.endpoint.page + low, self.copy.bytes.ctypes.data + low, high - low

    @contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except TransportError as exc:
            raise self._error(exc.message) from exc

    def _error(self, message: str) -> TransportError:
        return TransportError(message, version=self._version, phase="stage", member=self.member.name)


def name_of(code: int) -> str:
    """The name of the member with this code of `Page.awaited`."""
    return f"trainer-{code - 1}" if code > 0 else f"node-{-code - 1}"
