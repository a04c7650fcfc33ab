"""Choose the owner of each piece that several trainer ranks hold, so that ranks send about equal bytes. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .shards import Int64s

Holders = tuple[int, ...]
"""Ranks that hold the same pieces, in ascending order."""


def assign(nbytes: Int64s, holders: Int64s, sets: Sequence[Holders], load: Int64s) -> Int64s:
    """The owner of each piece i, a rank of `sets[holders[i]]`: [pieces]. `load`: bytes that each rank sends besides.

    Pieces with few holders are assigned first, because they leave less choice. The loads of the ranks of a set then
    differ by at most the largest piece, unless a rank already had more than its share.
    """
    owner = np.zeros(len(nbytes), np.int64)
    load = load.copy()
    order = np.argsort(holders, kind="stable")
    bounds = np.searchsorted(holders[order], np.arange(len(sets) + 1))
    for index in sorted(range(len(sets)), key=lambda index: (len(sets[index]), index)):
        pieces = order[bounds[index] : bounds[index + 1]]
        if len(pieces):
            owner[pieces] = _dealt(nbytes[pieces], np.array(sets[index], np.int64), load)
    return owner


def _dealt(nbytes: Int64s, ranks: Int64s, load: Int64s) -> Int64s:
    """The rank of each piece; adds to `load`.

    Most pieces are dealt in runs of neighbours, which then lie next to each other at the sender, too. That is exact to
    a piece at both ends of a run. The largest pieces are kept back to even that out, one by one.
    """
    largest_first = np.argsort(-nbytes, kind="stable")
    reserve = 3 * int(nbytes[largest_first[0]]) * len(ranks)
    num_kept = int(np.searchsorted(np.cumsum(nbytes[largest_first]), reserve)) + 1
    kept = largest_first[:num_kept]
    in_runs = np.sort(largest_first[num_kept:])
    dealt = np.zeros(len(nbytes), np.int64)
    if len(in_runs):
        sizes = nbytes[in_runs]
        room = _room(load[ranks], int(sizes.sum()))
        middle = np.cumsum(sizes) - sizes / 2
        position = np.minimum(np.searchsorted(np.cumsum(room), middle), len(ranks) - 1)
        dealt[in_runs] = ranks[position]
        load[ranks] += np.bincount(position, weights=sizes, minlength=len(ranks)).astype(np.int64)
    heap = [(int(load[rank]), rank) for rank in ranks.tolist()]
    heapq.heapify(heap)
    for piece, size in zip(kept.tolist(), nbytes[kept].tolist(), strict=True):
        sent, rank = heap[0]
        dealt[piece] = rank
        heapq.heapreplace(heap, (sent + size, rank))
    for sent, rank in heap:
        load[rank] = sent
    return dealt


def _room(load: Int64s, total: int) -> npt.NDArray[np.float64]:
    """How many of `total` bytes each rank takes so that the loads are equal, as far as those with much allow."""
    ascending = np.sort(load)
    levels = (np.cumsum(ascending) + total) / np.arange(1, len(load) + 1)
    level = levels[np.flatnonzero(ascending <= levels)[-1]]
    room: npt.NDArray[np.float64] = np.maximum(level - load, 0)
    return room
