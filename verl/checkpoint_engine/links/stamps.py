"""The stamp of a trainer rank's region identifies its content for nodes, which may read at any time. It lies next to
the region, never inside it.

It has the owner's incarnation (another process may have taken over the address), the number of the publication and the
version. If the stamps before and after a read are equal and of the requested version, every byte read belongs to that
version. Digests then check the content.
"""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..errors import TransportError, TransportTimeout
from ..memory.packed import PackedRegion
from ..memory.publishing import Publication, publish
from ..plan.delta_choice import DeltaRequest, Encoded
from ..plan.sync_plan import SyncPlan
from ..ports import WeightSource
from .deltas import OwnerDeltas
from .fetch import STOPPED_S
from .wire import OwnerAddress, UInt8s, Wire, WireReader

Stamps = npt.NDArray[np.int64]
"""Stamps of all owners: [owners, `Stamp.WORDS`], in the order of the reader's owners."""


class Stamp:
    """[incarnation, publication, version, base, bytes of the deltas] of an owner's region, in a page of its own.

    Deltas lead from the base, named by `identity_of`, to the version in the region; 0 bytes: no deltas.
    """

    WRITING = -(2**63)
    WORDS = 5
    NBYTES = 8 * WORDS

    def __init__(self) -> None:
        self.bytes: UInt8s = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._words = self.bytes.view(np.int64)
        self._words[: self.WORDS] = secrets.randbits(62), 0, self.WRITING, 0, 0

    @property
    def incarnation(self) -> int:
        return int(self._words[0])

    def begin(self) -> None:
        """Mark the region as changing, before it does."""
        self._words[2] = self.WRITING
        self._words[1] += 1

    def finish(self, version: int, base: int = 0, deltas_nbytes: int = 0) -> None:
        self._words[3:5] = base, deltas_nbytes
        self._words[2] = version


def read_stamps(reader: WireReader, target: UInt8s, deadline: float, raise_if_stopped: Callable[[int], None]) -> Stamps:
    """Read the stamps of all owners of `reader` into `target`, registered memory with room for them.

    Raises TransportError naming an owner whose region does not hold the reader's version; TransportTimeout at
    `deadline`, in seconds of `time.monotonic`.
    """
    waiting = {
        owner: reader.read(owner, address.stamp, target.ctypes.data + position * Stamp.NBYTES, Stamp.NBYTES)
        for position, (owner, address) in enumerate(reader.owners.items())
    }
    while waiting:
        waiting = {owner: transfer for owner, transfer in waiting.items() if not reader.is_done(transfer)}
        raise_if_stopped(reader.version)
        if waiting and time.monotonic() > deadline:
            names = ", ".join(f"trainer-{owner}" for owner in sorted(waiting))
            raise TransportTimeout(f"{names} cannot be read", version=reader.version, phase="stage")
        if waiting:
            reader.wait(STOPPED_S)
    stamps = np.frombuffer(target.tobytes(), np.int64).reshape(-1, Stamp.WORDS)
    for (owner, address), (incarnation, _, version, *_) in zip(reader.owners.items(), stamps.tolist(), strict=True):
        if (incarnation, version) != (address.incarnation, reader.version):
            raise reader.located(TransportError(_what_is_there(incarnation == address.incarnation, version)), owner)
    return stamps


def raise_if_changed(reader: WireReader, before: Stamps, after: Stamps) -> None:
    """Raises TransportError naming an owner that published between the two reads of its stamp."""
    for owner, changed in zip(reader.owners, (before != after).any(axis=1).tolist(), strict=True):
        if changed:
            raise reader.located(TransportError("it published again while it was read"), owner)


def _what_is_there(same_owner: bool, version: int) -> str:
    if not same_owner:
        return "another process answers at its address"
    return "it is publishing" if version == Stamp.WRITING else f"it holds version {version}"


class Exposed:
    """An owner's region, stamp and deltas, registered once with a wire. It must outlive it: nodes read at any time."""

    def __init__(self, plan: SyncPlan, owner: int, wire: Wire, *, with_deltas: bool) -> None:
        """Allocate and register memory for the pieces of `owner`, and for its deltas if `with_deltas`."""
        self.region = PackedRegion(plan, owner)
        self.stamp = Stamp()
        wire.register(self.region.bytes.numpy())
        wire.register(self.stamp.bytes)
        self._deltas: OwnerDeltas | None = None
        if with_deltas:
            self._deltas = OwnerDeltas(plan, owner, self.region)
            wire.register(self._deltas.bytes)
        self.address = OwnerAddress(
            wire.address(),
            self.stamp.incarnation,
            self.region.address,
            self.stamp.bytes.ctypes.data,
            deltas=self._deltas.bytes.ctypes.data if self._deltas is not None else 0,
        )

    def publish(self, version: int, source: WeightSource, request: DeltaRequest | None) -> Publication:
        """Copy the pieces from `source`. Also write deltas if `request` allows them and they are faster."""
        self.stamp.begin()
        if self._deltas is None:
            publication = publish(source, self.region)
            self.stamp.finish(version)
        else:
            publication = self._deltas.publish(version, source, request)
            self.stamp.finish(version, *self._deltas.leads_from)
        return publication

    def encoded(self, version: int) -> Encoded | None:
        return self._deltas.encoded(version) if self._deltas is not None else None
