"""What a node reads through: an endpoint in a transport library, what owners expose to it, a reader of one version."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import TransportError
from ..plan.types import Range
from ..support.admission import Admission

UInt8s = npt.NDArray[np.uint8]
LOOK_S = 0.0002
"""Between two looks at a transfer of a library that does not tell."""


class Wire(ABC):
    """One member's endpoint in a transport library. Used by one thread at a time; raises TransportError."""

    copies: bool = False
    """A read is a copy by the thread that asks for it, which has the bytes in its cache then."""

    keeps: bool = True
    """Registering takes so long that memory which comes again stays registered. Else it is only while it is read."""

    tells: bool = False
    """A `watch` is answered when the bytes have changed. Otherwise it is a read, and who watches asks again."""

    def admit(self, admission: Admission) -> None:  # noqa: B027 - many have nothing to listen on
        """Change who may connect, from now on."""

    @abstractmethod
    def register(self, memory: UInt8s) -> None:
        """Let `memory` be read by peers and be the target of reads. It must live until `deregister` or `close`."""

    @abstractmethod
    def deregister(self, memory: UInt8s) -> None:
        """Nothing may be in flight to or from `memory`."""

    @abstractmethod
    def address(self) -> bytes:
        """What peers need to reach the memory that is registered now."""

    @abstractmethod
    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        """Make `owner` readable."""

    @abstractmethod
    def read(self, owner: int, source: int, target: int, nbytes: int) -> Any:
        """Begin to copy `nbytes` from address `source` of `owner` to address `target` of this process.

        Returns the argument for `is_done`; anything but None.
        """

    @abstractmethod
    def is_done(self, transfer: Any) -> bool:
        """Whether every byte has arrived. Called until it is true, and then never again."""

    def wait(self, timeout_s: float) -> None:
        """Return when some transfer may be done, or after `timeout_s`; perhaps earlier."""
        time.sleep(min(timeout_s, LOOK_S))

    def watch(self, owner: int, source: int, target: int, nbytes: int) -> Any:
        """`read` a few bytes that change at their owner; `target` has the value that was read last."""
        return self.read(owner, source, target, nbytes)

    def changed(self) -> None:  # noqa: B027 - most are asked again
        """Notify peers that `watch` registered memory of this member of a change."""

    def is_idle(self) -> bool:
        """Whether `close` would interrupt no read at the owners; for libraries in which that does harm."""
        return True

    @abstractmethod
    def close(self) -> None:
        """End everything. No registered memory is touched after this returns; until then the wire keeps it alive."""


class OwnerAddress(msgspec.Struct, frozen=True):
    """The content of a trainer rank's `Member.address`, as JSON."""

    wire: bytes
    incarnation: int
    region: int
    """Where its packed region begins in its process."""
    stamp: int
    device: str = ""
    """The network device behind it, where that is known: ranks of one host may share it."""
    deltas: int = 0
    """Where its deltas begin in its process; 0: it makes none."""


@dataclass(frozen=True)
class _Transfer:
    version: int
    owner: int
    handle: Any


@dataclass(frozen=True)
class WireReader:
    """The `RangeReader` of one version over a `Wire`. It refuses transfers that another version's reader started."""

    wire: Wire
    owners: Mapping[int, OwnerAddress]
    slot: UInt8s
    bounce: UInt8s
    version: int

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> _Transfer:
        (part,) = ranges  # `messages_of` makes them so
        target = (self.bounce if bounce else self.slot).ctypes.data + part.dst_offset
        return self.read(owner, self.owners[owner].region + part.src_offset, target, part.nbytes)

    def read(self, owner: int, source: int, target: int, nbytes: int) -> _Transfer:
        try:
            return _Transfer(self.version, owner, self.wire.read(owner, source, target, nbytes))
        except TransportError as exc:
            raise self.located(exc, owner) from exc

    def is_done(self, transfer: _Transfer) -> bool:
        if transfer.version != self.version:
            stale = TransportError(f"a transfer of version {transfer.version} ended late")
            raise self.located(stale, transfer.owner)
        try:
            return self.wire.is_done(transfer.handle)
        except TransportError as exc:
            raise self.located(exc, transfer.owner) from exc

    def wait(self, timeout_s: float) -> None:
        self.wire.wait(timeout_s)

    def cancel(self, transfer: _Transfer) -> None:
        """The engine closes the wire after every failure; that ends this transfer with all others."""

    def located(self, error: TransportError, owner: int) -> TransportError:
        return TransportError(error.message, version=self.version, phase="stage", member=f"trainer-{owner}")
