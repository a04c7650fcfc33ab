"""An owner's last version on its accelerator, which compares there, so that only changed words go to the host.

    base      on the device, as the region on the host: pieces packed back to back, as they were published last
    whole     source -> base -> region, the last in one copy
    changes   source -> aside, compared with base; numbers and values of changed words -> host, which changes its
              region and writes the deltas (`DeltaWriter.take_changes`)

The host digests a piece before and after the change. If its region differs from the last publication, it is copied
again from the base. All code is torch, for CUDA, NPU and, in tests, the CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from ..ports import DeviceSource, WeightSource
from .digest import PieceDigests, UInt64s
from .publishing import Aside, Place, Publication, await_copies, copy_values

if TYPE_CHECKING:
    from .delta import DeltaWriter
    from .packed import PackedRegion

logger = logging.getLogger(__name__)
LARGEST_SHARE = 0.1
"""A base takes at most this fraction of the device's free memory, at the first request for deltas."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The integer type in which elements are compared, by bytes of an element."""


@dataclass(frozen=True)
class _Changes:
    """What changed in one place, on the host."""

    place: Place
    positions: torch.Tensor
    """Numbers of its words that changed, int32, ascending."""
    words: torch.Tensor
    """What they are now."""


def device_base_for(source: WeightSource, region: PackedRegion) -> DeviceBase | None:
    """A base with the content of `region` if `source` is on an accelerator with room for it, else None. Logs which."""
    device = source.device if isinstance(source, DeviceSource) else None
    if device is None or device.type == "cpu":
        return None
    free, _ = torch.get_device_module(device).mem_get_info(device)
    if region.bytes.nbytes > LARGEST_SHARE * free:
        logger.info(
            "the host compares versions for deltas: the last version needs %.2f GiB of %s, more than a tenth of its "
            "%.2f GiB of free memory",
            region.bytes.nbytes / 2**30,
            device,
            free / 2**30,
        )
        return None
    logger.info("deltas are made on %s, where the last version takes %.2f GiB", device, region.bytes.nbytes / 2**30)
    return DeviceBase(region, device)


class DeviceBase:
    """A copy of the owner's region on the device. Called on the owner's rank, by the thread that publishes."""

    def __init__(self, region: PackedRegion, device: torch.device) -> None:
        self._region = region
        self._bytes = region.bytes.to(device, copy=True)
        self._aside = Aside(device)
        self.compared_s = 0.0
        """Seconds of the last `publish_changes` until the changes were on the host; then the weights may change."""

    def publish(self, source: WeightSource) -> Publication:
        """As `publishing.publish`, through the base. Digests are taken from the copy."""
        start_s = time.perf_counter()
        for place in self._region.places(source.shards()):
            source.copy(place.shard, self._at(place))
        return self._all(start_s)

    def publish_changes(self, source: WeightSource, before: UInt64s, deltas: DeltaWriter) -> Publication:
        """As `publishing.publish` with `deltas`. `before`: the digests of the last version's pieces.

        Copies everything, and gives up `deltas`, if the changes would take half the bytes of the region.
        """
        start_s = time.perf_counter()
        places, found, room = self._region.places(source.shards()), list[_Changes](), self._region.nbytes // 2
        for number, place in enumerate(places):
            changes = self._take(source, place)
            room -= changes.positions.nbytes + changes.words.nbytes
            if room < 0:
                deltas.give_up()
                for rest in places[number + 1 :]:
                    source.copy(rest.shard, self._at(rest))
                return self._all(start_s)
            found.append(changes)
        self._await_copies()
        self.compared_s = time.perf_counter() - start_s
        digests = PieceDigests.none_of(len(before))
        if not all(self._change(changes, before, deltas, digests) for changes in found):
            logger.warning(
                "the copy of the last version on this host differs from the published one; it is copied again"
            )
            deltas.give_up()
            return self._all(start_s)
        nbytes = int(self._region.extents.nbytes.sum())
        return Publication(self._region, nbytes, time.perf_counter() - start_s, digests)

    def count_changed(self, source: WeightSource, places: Sequence[Place]) -> int:
        """The number of words of `places` that differ from the base, which is not changed."""
        counts = [torch.count_nonzero(_words(new) != _words(old)) for new, old in self._pairs(source, places)]
        return int(torch.stack(counts).sum()) if counts else 0

    def _pairs(self, source: WeightSource, places: Sequence[Place]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for place in places:
            new = self._aside.like(place.tensor)
            source.copy(place.shard, new)
            yield new, self._at(place)

    def _take(self, source: WeightSource, place: Place) -> _Changes:
        """Make the base the new version in `place`."""
        ((new, old),) = self._pairs(source, [place])
        now = _words(new)
        positions = torch.nonzero(now != _words(old)).view(-1)
        words = now[positions]
        old.copy_(new)
        return _Changes(place, _on_host(positions.to(torch.int32)), _on_host(words))

    def _change(self, changes: _Changes, before: UInt64s, deltas: DeltaWriter, digests: PieceDigests) -> bool:
        """Make the region the new version in a place; False if it was not the old one there."""
        place, positions, words = changes.place, changes.positions.numpy(), changes.words.numpy()
        memory = place.tensor.reshape(-1).view(torch.uint8).numpy()
        ends = np.cumsum(place.sizes)
        bounds = np.searchsorted(positions, ends // words.itemsize).tolist()
        start = low = 0
        for piece, end, high in zip(place.pieces, ends.tolist(), bounds, strict=True):
            part = memory[start:end]
            if xxhash.xxh3_64_intdigest(part.data) != before[piece]:
                return False
            if high > low:
                first = start // words.itemsize
                deltas.take_changes(piece, positions[low:high], words[low:high], first, part.ctypes.data, part.nbytes)
                digests.values[piece] = xxhash.xxh3_64_intdigest(part.data)
            else:
                digests.values[piece] = before[piece]
            digests.known[piece] = True
            start, low = end, high
        return True

    def _all(self, start_s: float) -> Publication:
        """Bring the base to the region, in one copy."""
        copy_values(self._region.bytes, self._bytes)
        self._await_copies()
        extents = self._region.extents
        seconds = time.perf_counter() - start_s
        return Publication(self._region, int(extents.nbytes.sum()), seconds, PieceDigests.none_of(len(extents)))

    def _await_copies(self) -> None:
        """Of the base's own device, which need not be this thread's current one."""
        if self._bytes.device.type == "cuda":
            await_copies(self._bytes.device)

    def _at(self, place: Place) -> torch.Tensor:
        """The part of the base that is `place`."""
        offset = place.tensor.data_ptr() - self._region.address
        part = self._bytes[offset : offset + place.tensor.nbytes]
        return part.view(place.tensor.dtype).view(place.tensor.shape)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: what is compared are bits."""
    return tensor.reshape(-1).view(WORDS[tensor.dtype.itemsize])


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Still on its way, from a CUDA device: see `await_copies`."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
