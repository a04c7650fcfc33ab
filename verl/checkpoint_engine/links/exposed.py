"""What a trainer rank shows to nodes that read when they like: its packed pieces, what changed in them, and a stamp."""

from __future__ import annotations

from ..memory.packed import PackedRegion
from ..memory.publishing import Publication, publish
from ..plan.delta_choice import DeltaRequest, Encoded
from ..plan.sync_plan import SyncPlan
from ..ports import WeightSource
from .deltas import OwnerDeltas
from .stamps import Stamp
from .wire import OwnerAddress, Wire


class Exposed:
    """Registered with a wire once. Nodes may read until that is closed, so it lives longer."""

    def __init__(self, plan: SyncPlan, owner: int, wire: Wire, *, with_deltas: bool) -> None:
        """The pieces of `owner`; `with_deltas`: also room for what changes from one version to the next."""
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
        """Copy the pieces from `source`, and write down what changed if `request` says so and it pays."""
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
