"""Dividing sequences among ranks and micro-batches by their lengths. Pure functions over integers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def get_seqlen_balanced_partitions(lengths: Sequence[int], k: int, equal_size: bool) -> list[list[int]]:
    """Indices of `lengths` in `k` non-empty parts whose sums are close; each part in ascending order.

    The longest sequence left goes to the part with the smallest sum (longest processing time first). Without
    `equal_size` the largest sum is at most 4/3 of the best possible one (R. Graham, 1969), and more parts never make it
    grow. With it, all parts get the same number of sequences: a part that is full takes no more.
    Equal inputs give equal results on every rank.

    Raises ValueError if `k` is not in 1..len(lengths), or does not divide len(lengths) where `equal_size` needs it to.
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


def rearrange_micro_batches(
    lengths: Sequence[int], max_token_len: int, *, min_num_micro_batches: int = 1
) -> list[list[int]]:
    """Indices of `lengths` in as few micro-batches as this finds of at most `max_token_len` tokens each.

    Ranks that must run the same number of forward passes call it once, take the largest number of micro-batches of all
    of them, and call it again with that as `min_num_micro_batches`: then each of them gets exactly this number.

    Raises ValueError for a sequence longer than `max_token_len`, or fewer sequences than `min_num_micro_batches`.
    """
    for index, length in enumerate(lengths):
        if length > max_token_len:
            raise ValueError(f"sequence {index} has {length} tokens, more than the {max_token_len} of one micro-batch")
    if min_num_micro_batches > len(lengths):
        raise ValueError(
            f"{len(lengths)} sequences cannot be divided into {min_num_micro_batches} micro-batches; "
            "give every rank the same number of sequences"
        )
    if not lengths:
        return []
    count = max(-(-sum(lengths) // max_token_len), min_num_micro_batches, 1)
    while True:
        parts = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
        if max(sum(lengths[index] for index in part) for part in parts) <= max_token_len:
            return parts
        count += 1


def get_reverse_idx(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`: `[shuffled[i] for i in get_reverse_idx(order)]` restores the original."""
    reverse = [0] * len(order)
    for position, index in enumerate(order):
        reverse[index] = position
    return reverse
