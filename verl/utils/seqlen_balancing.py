"""Divides sequences among ranks and micro-batches by their lengths. Pure functions over integers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def get_seqlen_balanced_partitions(lengths: Sequence[int], k: int, equal_size: bool) -> list[list[int]]:
    """Indices of `lengths` in `k` non-empty parts whose sums are close; each part in ascending order.

    The longest sequence left goes to the part with the smallest sum (longest processing time first). Without
    `equal_size` the largest sum is at most 4/3 of the best possible one (R. Graham, 1969), and more parts never
    increase it. With it, all parts get the same number of sequences: a full part gets no more. Equal inputs give equal
    results on every rank.

    Raises ValueError if `k` is not in 1..len(lengths), or does not divide len(lengths) with `equal_size`.
    """
    if not 1 <= k <= len(lengths):
        raise ValueError(f"{len(lengths)} sequences cannot be divided into {k} non-empty parts")
    if equal_size and len(lengths) % k:
        raise ValueError(f"{len(lengths)} sequences cannot be divided into {k} parts of equal size")
    capacity = len(lengths) // k if equal_size else len(lengths)
    # Sum, then size: sequences of length 0 must not leave a part empty.
    smallest: list[tuple[int, int, int]] = [(0, 0, part) for part in range(k)]
    parts: list[list[int]] = [[] for _ in range(k)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, size, part = heapq.heappop(smallest)
        parts[part].append(index)
        if size + 1 < capacity:
            heapq.heappush(smallest, (total + lengths[index], size + 1, part))
    return [sorted(part) for part in parts]


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Metrics `<prefix>/...` of the ranks' numbers of tokens.

    `min`, `max` and `minmax_diff` are for equal consecutive parts of `seqlen_list`, `balanced_min` and `balanced_max`
    for `partitions`, the indices of each rank's sequences; `mean` for both. All ranks have equally many sequences.
    """
    size = len(seqlen_list) // len(partitions)
    before = [sum(seqlen_list[rank * size : (rank + 1) * size]) for rank in range(len(partitions))]
    after = [sum(seqlen_list[index] for index in part) for part in partitions]
    numbers = {
        "min": min(before),
        "max": max(before),
        "minmax_diff": max(before) - min(before),
        "balanced_min": min(after),
        "balanced_max": max(after),
        "mean": sum(seqlen_list) / len(partitions),
    }
    return {f"{prefix}/{name}": float(number) for name, number in numbers.items()}


def ceildiv(a: int, b: int) -> int:
    """The smallest integer that is not below `a / b`."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of `b` that is not below `a`."""
    return ceildiv(a, b) * b


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of the permutation `idx_map`."""
    return sorted(range(len(idx_map)), key=lambda place: idx_map[place])
