"""The loop that copies weights out of a trainer and digests them in the same pass. The backend supplies the memory."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import xxhash

from ..plan.shards import Extents
from ..plan.sync_plan import SyncPlan
from ..plan.types import Box, Shard
from ..ports import ViewableSource, WeightSource
from .digest import CACHED_NBYTES, PieceDigests

if TYPE_CHECKING:
    import torch

    from .delta import DeltaWriter
    from .slot import SlotView

COPY_NBYTES = 16 * 2**20
"""The most bytes of one request to a source, unless one piece is larger."""
PAST_CACHE_NBYTES = 2**18
"""Copies from this size on write past the cache."""


def publisher_environment() -> dict[str, str]:
    """Variables to add to the environment of a new process that publishes.

    They make memcpy write past the cache, without first reading the memory that it overwrites: ranks of a host share
    its memory bandwidth. glibc alone does so from some hundred MiB on (https://sourceware.org/glibc/manual, tunables).
    """
    name, given = "glibc.cpu.x86_non_temporal_threshold", os.environ.get("GLIBC_TUNABLES", "")
    if name in given:
        return {}
    return {"GLIBC_TUNABLES": f"{given}:{name}={PAST_CACHE_NBYTES}".removeprefix(":")}


@dataclass(frozen=True)
class Place:
    """The destination of a run of neighbouring pieces, which lies in one of the source's shards."""

    shard: Shard
    tensor: torch.Tensor
    """The destination: shape of the shard's box, dtype of the spec; borrowed. Strided only for a single piece."""
    pieces: range
    """The pieces, as rows of `PieceMemory.extents`."""
    sizes: Sequence[int]
    """The bytes of each piece, in order."""


class PieceMemory(Protocol):
    """Memory with a place for every piece of one owner."""

    @property
    def bytes(self) -> torch.Tensor:
        """The whole memory, uint8."""

    def places(self, held: Sequence[Shard]) -> Sequence[Place]:
        """The places to fill. `held`: the shards of the source."""

    @property
    def extents(self) -> Extents:
        """The place of each piece in `bytes`, in the order of `SyncPlan.pieces_of`."""


@dataclass(frozen=True)
class Publication:
    """The result of one trainer rank's copy: the memory of its pieces, the bytes written, and the seconds.

    `memory` is borrowed from the backend until its next `send_weights` or `finalize`.
    """

    memory: PieceMemory
    nbytes: int
    seconds: float
    digests: PieceDigests
    """Digests of the trainer's own values; missing ones are computed from the copy."""


def publish(source: WeightSource, memory: PieceMemory, deltas: DeltaWriter | None = None) -> Publication:
    """Copy every piece of an owner out of `source`, converted to the dtype of its spec. Called on the owner's rank.

    With `deltas`, `memory` holds the base, and the difference to it is written to `deltas`.

    The trainer must not change the weights during this call. It leaves to later what works on the copy: other slots,
    wires, and digests of pieces that the source could not `view`.
    """
    start_s = time.perf_counter()
    nbytes, viewable = memory.extents.nbytes, source if isinstance(source, ViewableSource) else None
    digests, aside = PieceDigests.none_of(len(nbytes)), Aside()
    for place in memory.places(source.shards()):
        values = viewable.view(place.shard) if viewable is not None else None
        if values is None and deltas is not None:  # the old bytes are to be compared, so the new ones go elsewhere
            values = aside.like(place.tensor)
            source.copy(place.shard, values)
        if values is None or not place.tensor.is_contiguous():
            source.copy(place.shard, place.tensor)
        else:
            rows = slice(place.pieces.start, place.pieces.stop)
            digests.values[rows] = _copy_and_digest(values, place, deltas)
            digests.known[rows] = True
    await_copies()
    seconds = time.perf_counter() - start_s
    return Publication(memory, int(nbytes.sum()), seconds, digests)


class Aside:
    """Temporary memory for one tensor at a time, on the CPU or another device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._bytes: torch.Tensor | None = None

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the shape and dtype of `tensor`. It overwrites the previous one."""
        import torch

        if self._bytes is None or self._bytes.nbytes < tensor.nbytes:
            self._bytes = torch.empty(tensor.nbytes, dtype=torch.uint8, device=self._device)
        return self._bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _copy_and_digest(values: torch.Tensor, place: Place, deltas: DeltaWriter | None) -> list[int]:
    """The digests of the pieces of `place`, as `digest_piece` would find them in it, of what the cache has.

    Neither the copy nor the digest holds Python's global lock: the rank may be training meanwhile.
    """
    # Not through numpy: a storage of which it has seen a tensor can never be resized again, which FSDP does to its own.
    readable = memoryview((ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr()))
    source, target, found, start = values.data_ptr(), place.tensor.data_ptr(), [], 0
    for piece, nbytes in zip(place.pieces, place.sizes, strict=True):
        end = start + nbytes
        if deltas is not None:
            deltas.take(piece, source + start, target + start, nbytes)
            found.append(xxhash.xxh3_64_intdigest(readable[start:end]))
        elif nbytes <= CACHED_NBYTES:  # by default all are; in one go the digest takes a tenth less
            ctypes.memmove(target + start, source + start, nbytes)
            found.append(xxhash.xxh3_64_intdigest(readable[start:end]))
        else:
            hasher = xxhash.xxh3_64()
            for low in range(start, end, CACHED_NBYTES):
                high = min(low + CACHED_NBYTES, end)
                ctypes.memmove(target + low, source + low, high - low)
                hasher.update(readable[low:high])
            found.append(hasher.intdigest())
        start = end
    return found


def copy_values(destination: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` of any dtype, device and strides to `destination`: for the `copy` of sources.

    Without a conversion it is a plain memcpy, which can write past the cache (`publisher_environment`); torch's own
    copies never do. From a CUDA device into pinned memory the copy is asynchronous: see `await_copies`.
    """
    plain = (
        values.dtype == destination.dtype
        and values.device.type == destination.device.type == "cpu"
        and values.is_contiguous()
        and destination.is_contiguous()
    )
    if plain:
        ctypes.memmove(destination.data_ptr(), values.data_ptr(), values.nbytes)
    else:
        if values.device.type != "cpu" == destination.device.type:  # or torch moves the wider ones, and casts here
            values = values.to(destination.dtype)
        destination.copy_(values, non_blocking=_is_awaited(destination, values))


def _is_awaited(destination: torch.Tensor, values: torch.Tensor) -> bool:
    import torch

    return (
        values.device.type == "cuda"
        and values.device.index == torch.cuda.current_device()
        and destination.device.type == "cpu"
        and destination.is_contiguous()
        and destination.is_pinned()
    )


def await_copies(device: torch.device | None = None) -> None:
    """Wait for this thread's copies from `device`, by default the current one, into pinned memory."""
    import torch

    from ..support.device import has_cuda_context

    if has_cuda_context():
        torch.cuda.current_stream(device).synchronize()


def joined_pieces(
    plan: SyncPlan, owner: int, extents: Extents, held: Sequence[Shard]
) -> Iterator[tuple[int, Shard, range]]:
    """Join neighbouring pieces at `extents` that form one box inside one of `held`: (offset, shard, pieces), in order.

    A request to a source costs tens of microseconds of Python at any size. COPY_NBYTES limits it, for sources that
    allocate memory for it. Pure.
    """
    boxes: dict[str, list[Box]] = {}
    for shard in held:
        boxes.setdefault(shard.name, []).append(shard.box)
    pending: tuple[int, int, Shard, int] | None = None
    places = extents.of(range(len(extents)))
    for piece, ((offset, run_nbytes, rows, _), shard) in enumerate(zip(places, plan.shards_of(owner), strict=True)):
        if pending is not None:
            start, end, before, first = pending
            if rows == 1 and offset == end and end + run_nbytes - start <= COPY_NBYTES and _continues(before, shard):
                box = Box(before.box.start, (shard.box.stop[0], *before.box.stop[1:]))
                if any(whole.contains(box) for whole in boxes[shard.name]):
                    pending = start, end + run_nbytes, Shard(shard.name, box), first
                    continue
            yield start, before, range(first, piece)
        pending = offset, offset + run_nbytes if rows == 1 else -1, shard, piece
    if pending is not None:
        yield pending[0], pending[2], range(pending[3], len(extents))


def _continues(before: Shard, shard: Shard) -> bool:
    """Whether the rows of `shard` are the next ones."""
    first, then = before.box, shard.box
    return (
        shard.name == before.name
        and first.stop[:1] == then.start[:1] != ()
        and (first.start[1:], first.stop[1:]) == (then.start[1:], then.stop[1:])
    )


class SlotPieces:
    """One owner's pieces in a node's slot: a `PieceMemory` for owners on the node's host."""

    def __init__(self, slot: SlotView, plan: SyncPlan, owner: int) -> None:
        self.bytes = slot.bytes
        self.extents = plan.extents_of(owner)
        self._slot, self._plan, self._owner = slot, plan, owner
        self._places: list[Place] | None = None

    def places(self, held: Sequence[Shard]) -> Sequence[Place]:
        if self._places is None:
            specs = {spec.name: spec for spec in self._slot.layout.specs}
            sizes = self.extents.nbytes.tolist()
            self._places = [
                Place(
                    shard,
                    self._slot.tensor(specs[shard.name])[tuple(map(slice, shard.box.start, shard.box.stop))],
                    pieces,
                    sizes[pieces.start : pieces.stop],
                )
                for _, shard, pieces in joined_pieces(self._plan, self._owner, self.extents, held)
            ]
        return self._places
