"""Both ends of a sync with deltas: the owner writes them, the node fetches and applies them.

    owner    its region holds the last version; while it publishes the next one it also writes deltas (`DeltaWriter`),
             and its stamp names their base
    node     if its committed version is that base, it fetches the deltas instead of the pieces, and makes the spare
             slot from the committed one; it fetches pieces whole whose delta fails

The region always has the whole version, too: for nodes with another version, for nodes that join later, and for pieces
that come out wrong.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..errors import TransportError
from ..memory.delta import (
    Applier,
    Deltas,
    DeltaWriter,
    codes_of,
    identity_of,
    is_warm,
    room_nbytes,
)
from ..memory.digest import Manifest, PieceDigests, UInt64s
from ..memory.packed import PackedRegion, Packing
from ..memory.publishing import Aside, Publication, publish
from ..memory.threads import memory_threads
from ..plan.delta_choice import DeltaRequest, Encoded, Predicted, predict, prefers_delta
from ..plan.layout import align
from ..plan.sync_plan import SyncPlan
from ..plan.types import Range
from ..ports import ViewableSource, WeightSource
from .fetch import Bucket
from .wire import UInt8s, WireReader

if TYPE_CHECKING:
    from ..memory.device_base import DeviceBase
    from ..memory.publishing import Place
    from ..memory.slot import SlotView

logger = logging.getLogger(__name__)
SAMPLED_OF = 32
"""The owner compares one in this many places with the base to decide between full and delta."""


@dataclass(frozen=True)
class _Made:
    """Deltas that are there."""

    base_version: int
    base: int
    nbytes: int


class OwnerDeltas:
    """A trainer rank's region and its deltas. Called on that rank, by the thread that publishes."""

    def __init__(self, plan: SyncPlan, owner: int, region: PackedRegion) -> None:
        self._plan, self._owner, self._region = plan, owner, region
        self._writer = DeltaWriter(plan, owner, region.nbytes)
        self._last: tuple[int, PieceDigests] | None = None
        """The version in the region, and its digests."""
        self._made: _Made | None = None
        self._encoded: tuple[int, Encoded] | None = None
        self._base: DeviceBase | None = None
        """The region's version on the trainer's device, if it fits there."""
        self._is_asked = False
        """Whether the device has been checked for such a base."""

    @property
    def bytes(self) -> UInt8s:
        return self._writer.bytes

    @property
    def leads_from(self) -> tuple[int, int]:
        """For the stamp: the identity of the base, and the bytes of the deltas; both 0 without deltas."""
        return (self._made.base, self._made.nbytes) if self._made is not None else (0, 0)

    def encoded(self, version: int) -> Encoded | None:
        return self._encoded[1] if self._encoded is not None and self._encoded[0] == version else None

    def publish(self, version: int, source: WeightSource, request: DeltaRequest | None) -> Publication:
        """As `publishing.publish`. Writes deltas if the region holds the base of `request` and they are faster."""
        last, made = self._last, self._made
        self._last = self._made = self._encoded = None
        if request is None or last is None or not is_warm():
            publication = self._publish_all(source)
        elif last[0] == request.base:
            publication = self._publish_from(last[1], version, source, request)
        else:
            before = self._completed(last[1])
            publication = self._publish_all(source)
            is_again = last[0] == version and made is not None and made.base_version == request.base
            if is_again and (self._completed(publication.digests) == before).all():
                self._made = made  # it is tried again: what led to these bytes still does
                self._note(version, self.leads_from[1], publication)
        self._last = version, publication.digests
        return publication

    def _publish_all(self, source: WeightSource) -> Publication:
        return publish(source, self._region) if self._base is None else self._base.publish(source)

    def _completed(self, digests: PieceDigests) -> UInt64s:
        return digests.completed(self._region.bytes.numpy(), self._region.extents, threads=memory_threads())

    def _publish_from(
        self, before: PieceDigests, version: int, source: WeightSource, request: DeltaRequest
    ) -> Publication:
        digests = self._completed(before)
        base = identity_of(self._plan, self._owner, digests)
        if not self._is_asked:
            from ..memory.device_base import device_base_for

            self._base, self._is_asked = device_base_for(source, self._region), True
        start_s = time.perf_counter()
        predicted, words, changed = None, 0, 0
        if not request.always:
            words, changed = self._sample(source)
            predicted = predict(
                request.rates,
                nbytes=request.nbytes,
                owner_nbytes=self._region.nbytes,
                fraction=changed / max(words, 1),
                word_nbytes=self._region.nbytes / max(self._words, 1),
            )
        if predicted is not None and not prefers_delta(predicted, was_delta=request.was_delta):
            publication = self._publish_all(source)
            self._encoded = (
                version,
                Encoded(
                    nbytes=0,
                    nbytes_full=publication.nbytes,
                    words=words,
                    changed=changed,
                    seconds=publication.seconds,
                    predicted=predicted,
                ),
            )
            return publication
        self._writer.begin()
        if self._base is None:
            publication = publish(source, self._region, self._writer)
        else:
            publication = self._base.publish_changes(source, digests, self._writer)
        publication = replace(publication, seconds=time.perf_counter() - start_s)
        nbytes = self._writer.finish()
        if nbytes:
            self._made = _Made(request.base, base, nbytes)
        self._note(version, nbytes, publication, predicted)
        return publication

    def _note(self, version: int, nbytes: int, publication: Publication, predicted: Predicted | None = None) -> None:
        changed = self._writer.changed
        self._encoded = (
            version,
            Encoded(
                nbytes=nbytes,
                nbytes_full=publication.nbytes,
                words=self._words,
                changed=int(changed.sum()),
                changed_of_pieces=changed.astype(np.int32).tobytes(),
                seconds=publication.seconds,
                predicted=predicted,
            ),
        )

    @property
    def _words(self) -> int:
        pieces = self._plan.pieces_of(self._owner)
        widths = codes_of(self._plan, slice(pieces.start, pieces.stop))[:, 0]
        return int((self._region.packing.nbytes // widths).sum())

    def _sample(self, source: WeightSource) -> tuple[int, int]:
        """(words that were compared, words of these that changed)"""
        from ..memory import delta_codec

        places, aside, words, changed = self._region.places(source.shards()), Aside(), 0, 0
        viewable = source if isinstance(source, ViewableSource) else None
        places = places[:: min(SAMPLED_OF, max(len(places) // 8, 1))]
        if self._base is not None:
            words = sum(place.tensor.nbytes // self._width_of(place) for place in places)
            return words, self._base.count_changed(source, places)
        for place in places:
            values = viewable.view(place.shard) if viewable is not None else None
            if values is None:
                values = aside.like(place.tensor)
                source.copy(place.shard, values)
            width = self._width_of(place)
            nbytes = place.tensor.nbytes
            words += nbytes // width
            changed += delta_codec.count_changed(values.data_ptr(), place.tensor.data_ptr(), nbytes, width)
        return words, changed

    def _width_of(self, place: Place) -> int:
        return min(place.tensor.dtype.itemsize, 8)


class NodeDeltas:
    """A node's memory for the deltas of one version, one owner's after the other."""

    def __init__(self, plan: SyncPlan) -> None:
        self._plan = plan
        owners = range(plan.num_owners)
        self._room = [
            room_nbytes(Packing.of(plan, owner).region_nbytes, len(plan.pieces_of(owner))) for owner in owners
        ]
        memory = mmap.mmap(-1, max(sum(self._room), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: UInt8s = np.frombuffer(memory, np.uint8)

    def places(self, offered: Mapping[int, int]) -> dict[int, Range]:
        """The place of each owner's deltas in this memory. `offered`: their bytes, by owner. Raises TransportError."""
        places, end = {}, 0
        for owner, nbytes in offered.items():
            if not 0 < nbytes <= self._room[owner] or nbytes % 8:
                raise TransportError(f"it reports {nbytes} bytes of deltas", member=f"trainer-{owner}")
            places[owner] = Range(0, end, nbytes)
            end += align(nbytes)
        return places

    def apply(
        self,
        places: Mapping[int, Range],
        base: tuple[Manifest, SlotView],
        slot: UInt8s,
        arrived: PieceDigests,
        *,
        stopped: Callable[[], bool],
    ) -> tuple[set[int], list[int]]:
        """Write the pieces of the owners in `places` to `slot`, from `base` and the deltas. `slot` may be `base`'s own.

        Returns the owners whose deltas have an intact head and table, and the rows in the plan of those of their
        pieces that could not be made.
        """
        deltas = []
        for owner, place in places.items():
            try:
                data = self.bytes[place.dst_offset : place.dst_offset + place.nbytes]
                deltas.append(Deltas.parse(self._plan, owner, data))
            except TransportError as exc:
                logger.warning("%s; its pieces are fetched whole", exc)
        applier = Applier(self._plan, base[1].bytes.numpy(), slot, arrived)
        wrong = applier.apply(deltas, threads=memory_threads(), stopped=stopped)
        return {one.owner for one in deltas}, wrong


def buckets_of(places: Mapping[int, Range], most_nbytes: int, within: Range | None = None) -> list[Bucket]:
    """Buckets for all deltas at `places`, or for those in the part `within` of the memory. Pure."""
    buckets = []
    for owner, place in places.items():
        low, high = place.dst_offset, place.dst_offset + place.nbytes
        if within is not None:
            low, high = max(low, within.dst_offset), min(high, within.dst_offset + within.nbytes)
        for start in range(low, high, most_nbytes):
            nbytes = min(most_nbytes, high - start)
            buckets.append(Bucket(owner, (Range(start - place.dst_offset, start, nbytes),), nbytes))
    return buckets


def reader_of(reader: WireReader, memory: UInt8s) -> WireReader:
    """A reader of the same owners' deltas, into `memory`."""
    owners = {
        owner: msgspec.structs.replace(address, region=address.deltas) for owner, address in reader.owners.items()
    }
    return replace(reader, owners=owners, slot=memory)


def fitting(manifest: Manifest, bases: Mapping[int, int]) -> set[int]:
    """The owners whose base is the version of `manifest`. `bases`: the identity of each owner's base."""
    plan, digests = manifest.plan, manifest.digests
    return {
        owner
        for owner, base in bases.items()
        if owner < plan.num_owners
        and identity_of(plan, owner, digests[plan.pieces_of(owner).start : plan.pieces_of(owner).stop]) == base
    }
