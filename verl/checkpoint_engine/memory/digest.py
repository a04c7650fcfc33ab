"""Digests of pieces, and the manifest that carries them from the trainer to the rollout nodes.

xxh3 (https://github.com/Cyan4973/xxHash) detects accidents, not attackers: torn writes, stale buffers, flipped bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import IntegrityError, PlanError
from ..plan.encoded import UNREADABLE
from ..plan.shards import ROWS_AT_A_TIME, Extents
from ..plan.sync_plan import SyncPlan

MANIFEST_FORMAT = 1
MAX_PIECES_IN_MESSAGE = 8
CACHED_NBYTES = 2**20
"""Bytes copied between two digests of a copy: a core's own cache holds them."""

UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Manifest:
    """The exact content of a version: the plan (with its layout) and the digest of each of its pieces."""

    version: int
    plan: SyncPlan
    digests: UInt64s

    @classmethod
    def of(cls, version: int, plan: SyncPlan, per_owner: Sequence[UInt64s]) -> Manifest:
        """Join the digests of all owners, rank 0 first. Raises IntegrityError if an owner's are missing or too many."""
        for owner, digests in enumerate(per_owner):
            expected = len(plan.pieces_of(owner))
            if len(digests) != expected:
                raise IntegrityError(
                    f"trainer-{owner} sent {len(digests)} digests for {expected} pieces",
                    version=version,
                    phase="verify",
                )
        return cls(version, plan, np.concatenate(per_owner) if per_owner else np.zeros(0, np.uint64))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the weights: of names, dtypes and shapes, and of every piece."""
        return xxhash.xxh3_64_hexdigest(self.plan.layout.digest.encode() + self.digests.tobytes())

    def encode(self) -> bytes:
        return msgspec.msgpack.encode([MANIFEST_FORMAT, self.version, self.plan.encode(), self.digests.tobytes()])

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Undo `encode`. Raises IntegrityError for other bytes and unknown formats."""
        try:
            form, version, encoded_plan, digests = msgspec.msgpack.decode(data, type=tuple[int, int, bytes, bytes])
            if form != MANIFEST_FORMAT:
                raise IntegrityError(f"the manifest has format {form}; this code reads format {MANIFEST_FORMAT}")
            plan = SyncPlan.decode(encoded_plan)
            if len(digests) != len(plan) * np.uint64().itemsize:
                raise ValueError(f"{len(digests)} bytes of digests of {len(plan)} pieces")
            return cls(version, plan, np.frombuffer(digests, np.uint64))
        except (PlanError, *UNREADABLE) as exc:
            raise IntegrityError(f"not a manifest: {exc}") from exc


@dataclass(frozen=True)
class PieceDigests:
    """Digests of pieces taken during a copy or a transfer, while a core's cache held the bytes; perhaps not of all."""

    values: UInt64s
    known: npt.NDArray[np.bool_]
    """Which of `values` hold a digest."""

    @classmethod
    def none_of(cls, pieces: int) -> PieceDigests:
        return cls(np.zeros(pieces, np.uint64), np.zeros(pieces, np.bool_))

    def completed(self, region: npt.NDArray[np.uint8], extents: Extents, *, threads: int) -> UInt64s:
        """The digests of all pieces. Missing ones are computed from `region`, with the pieces at `extents`."""
        values, missing = self.values.copy(), np.flatnonzero(~self.known)
        if len(missing):
            values[missing] = digest_pieces(region, extents.take(missing), threads=threads)
        return values


def digest_piece(region: npt.NDArray[np.uint8], offset: int, run_nbytes: int, rows: int, stride: int) -> int:
    """xxh3_64 of one piece's bytes in C order. Offsets count from the beginning of `region`."""
    if rows == 1:
        return xxhash.xxh3_64_intdigest(region[offset : offset + run_nbytes].data)
    runs = np.lib.stride_tricks.as_strided(region[offset:], (rows, run_nbytes), (stride, 1), writeable=False)
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(runs).data)


def digest_pieces(region: npt.NDArray[np.uint8], extents: Extents, *, threads: int = 1) -> UInt64s:
    """The digests of the pieces at `extents` of `region`, in that order: [pieces].

    xxhash releases Python's global lock for large inputs, so threads run in parallel.
    """
    digests = np.empty(len(extents), np.uint64)

    def fill(bounds: tuple[int, int]) -> None:
        for low in range(*bounds, ROWS_AT_A_TIME):
            part = range(low, min(low + ROWS_AT_A_TIME, bounds[1]))
            found = (digest_piece(region, *extent) for extent in extents.of(part))
            digests[part.start : part.stop] = np.fromiter(found, np.uint64, len(part))

    bounds = np.linspace(0, len(extents), threads + 1).astype(int).tolist()
    parts = list(itertools.pairwise(bounds))
    if threads == 1:
        fill(parts[0])
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
            list(pool.map(fill, parts))
    return digests


def verify(
    region: npt.NDArray[np.uint8], manifest: Manifest, *, threads: int = 1, arrived: PieceDigests | None = None
) -> None:
    """Raises IntegrityError naming tensor, box and owner of the pieces that `differing` returns."""
    wrong = differing(region, manifest, threads=threads, arrived=arrived)
    if wrong:
        raise IntegrityError(
            f"{len(wrong)} of {len(manifest.plan)} pieces are not what the trainer sent: {named(manifest.plan, wrong)}",
            version=manifest.version,
            phase="verify",
        )


def differing(
    region: npt.NDArray[np.uint8], manifest: Manifest, *, threads: int = 1, arrived: PieceDigests | None = None
) -> list[int]:
    """The pieces of `region`, as rows of the plan, whose digest differs from the manifest's. A digest in `arrived` is
    not computed again."""
    plan = manifest.plan
    found = (arrived or PieceDigests.none_of(len(plan))).completed(region, plan.extents, threads=threads)
    wrong: list[int] = np.flatnonzero(found != manifest.digests).tolist()
    return wrong


def named(plan: SyncPlan, pieces: Sequence[int]) -> str:
    """Describe the first MAX_PIECES_IN_MESSAGE of `pieces`, for messages."""
    names = "; ".join(plan.describe(piece) for piece in pieces[:MAX_PIECES_IN_MESSAGE])
    left = len(pieces) - MAX_PIECES_IN_MESSAGE
    return f"{names}; and {left} more" if left > 0 else names
