"""The interface of wires: an endpoint in a transport library, an owner's address, and the reader of one version."""

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
"""The pause between polls of a transfer, if the library does not notify."""


class Wire(ABC):
    """One member's endpoint in a transport library. Used by one thread at a time; raises TransportError."""

    copies: bool = False
    """The calling thread copies the bytes of a read, so its core's cache holds them then."""

    keeps: bool = True
    """Registering is slow, so slots stay registered between versions. Otherwise they are registered per transfer."""

    tells: bool = False
    """A `watch` ends when the bytes have changed. Otherwise it is a plain read, to be repeated."""

    def admit(self, admission: Admission) -> None:  # noqa: B027 - many have nothing to listen on
        """Set the peers that may connect from now on."""

    @abstractmethod
    def register(self, memory: UInt8s) -> None:
        """Let peers read `memory`, and reads target it. It must live until `deregister` or `close`."""

    @abstractmethod
    def deregister(self, memory: UInt8s) -> None:
        """Undo `register`. No transfer to or from `memory` may be in flight."""

    @abstractmethod
    def address(self) -> bytes:
        """The address through which peers reach the memory that is registered now."""

    @abstractmethod
    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        """Connect to `owner`, so that `read` can read its memory."""

    @abstractmethod
    def read(self, owner: int, source: int, target: int, nbytes: int) -> Any:
        """Begin to copy `nbytes` from address `source` of `owner` to address `target` of this process.

        Returns the argument for `is_done`; anything but None.
        """

    @abstractmethod
    def is_done(self, transfer: Any) -> bool:
        """Whether every byte has arrived. Not called again after it has returned true."""

    def wait(self, timeout_s: float) -> None:
        """Return when some transfer may be done, after `timeout_s`, or earlier."""
        time.sleep(min(timeout_s, LOOK_S))

    def watch(self, owner: int, source: int, target: int, nbytes: int) -> Any:
        """`read` a few bytes that the owner changes; `target` holds the last value read."""
        return self.read(owner, source, target, nbytes)

    def changed(self) -> None:  # noqa: B027 - most are asked again
        """Notify the peers that `watch` memory of this member that it has changed."""

    def is_idle(self) -> bool:
        """Whether `close` interrupts no read; in some libraries an interrupted read harms the owner."""
        return True

    @abstractmethod
    def close(self) -> None:
        """End all transfers. The wire keeps registered memory alive until this returns, and does not touch it later."""


class OwnerAddress(msgspec.Struct, frozen=True):
    """The content of a trainer rank's `Member.address`, as JSON."""

    wire: bytes
    incarnation: int
    region: int
    """The address of its packed region in its process; `stamp` likewise."""
    stamp: int
    device: str = ""
    """Its network device, if known: ranks of one host may share one."""
    deltas: int = 0
    """The address of its deltas in its process; 0: it makes none."""


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
        """Does nothing: after a failure the engine abandons the wire and with it all transfers."""

    def located(self, error: TransportError, owner: int) -> TransportError:
        return TransportError(error.message, version=self.version, phase="stage", member=f"trainer-{owner}")
