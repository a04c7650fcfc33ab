"""What a node that passes a version on shows to the next: which parts of which publication are there, and where."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import TransportError
from ..plan.layout import align
from ..plan.shards import Int64s
from .wire import UInt8s


class Endpoint(msgspec.Struct, frozen=True):
    """What a node's `Member.address` holds if nodes pass a version on, as JSON."""

    wire: bytes
    page: int
    page_nbytes: int


class Page:
    """[publication, address of the slot, bytes of the wire's address], the wire's address, one byte per part, [whom the
    node waits for].

    A wire's address may change when memory is registered, so it travels in the page, too.
    """

    HEADER = 24
    MAX_ADDRESS = 2**16
    PARTS = HEADER + MAX_ADDRESS
    WORD = 8
    EMPTY = 0
    """No publication, and nobody who is waited for."""

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
        """One word: 1 + index of a trainer rank, -(1 + index) of a node, or `EMPTY`."""
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
    """A number other than `Page.EMPTY` that is equal exactly where the stamps of all owners are."""
    return (xxhash.xxh3_64_intdigest(stamps.tobytes()) >> 1) | 1
