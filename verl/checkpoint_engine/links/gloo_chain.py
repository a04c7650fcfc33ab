"""Broadcasts over gloo along a chain: every member passes on what it gets, while the rest is still to come.

    rank 0 --> rank 1 --> rank 2 --> ...

gloo's own broadcast is a tree, in which rank 0 sends everything once per level: with five receivers three times, over
the network that all of them wait for. In a chain everybody sends it once. A group is a row of pairs, each a gloo group
of its own: torch's gloo can be asked whether a broadcast is done, but not whether a single send or receive is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..compat.torch import PrefixStore, Store
from ..plan.topology import MAX_LANES, Lane
from .communicators import Flight, Gloo, post

SEGMENT_NBYTES = 8 * 2**20
"""What is passed on at once; smaller ones take longer where memory is the limit. A member is two of them behind the
one before it."""


class GlooChain(Gloo):
    """A `Communicator` from and into host memory, without a copy."""

    def group(self, store: Store, rank: int, size: int, lane: Lane, timeout_s: float) -> Chain:
        """Every member makes its pairs in the order of the chain, so that none waits for another in a circle."""
        pairs = [
            super(GlooChain, self).group(PrefixStore(f"pair-{left}", store), rank - left, 2, lane, timeout_s)
            if 0 <= left < size - 1
            else None
            for left in (rank - 1, rank)
        ]
        return Chain(*pairs, segment_nbytes=SEGMENT_NBYTES if size > 2 else None)

    def broadcast(self, group: Chain, memory: torch.Tensor, *, sending: bool) -> Flight:
        return group.broadcast(memory)

    def leave(self, group: Chain) -> None:
        group.close()

    def max_in_flight(self, per_owner: int, owners: int) -> int:
        return per_owner * min(owners, MAX_LANES)

    def release(self) -> None:
        self._devices.clear()


@dataclass
class _Segment:
    memory: torch.Tensor
    arriving: dist.Work | None
    """None at rank 0."""
    leaving: dist.Work | None = None
    """None until it has arrived, and at the last rank."""


class Chain:
    """One member's place: a group of two with the member before it, and one with the member after it."""

    def __init__(self, before: Any, after: Any, *, segment_nbytes: int | None) -> None:
        """`segment_nbytes`: None if nobody passes anything on."""
        self._before, self._after = before, after
        self._segment_nbytes = segment_nbytes
        self._arriving: deque[_Segment] = deque()
        """To be passed on in this order, in which the next member expects them, whichever is here first."""

    def broadcast(self, memory: torch.Tensor) -> _ChainFlight:
        """Every member calls it in the same order; at rank 0 `memory` is what all others get in theirs."""
        step = self._segment_nbytes or max(len(memory), 1)
        segments = deque(self._begin(memory[start : start + step]) for start in range(0, max(len(memory), 1), step))
        return _ChainFlight(self, segments)

    def _begin(self, memory: torch.Tensor) -> _Segment:
        if self._before is None:
            return _Segment(memory, None, post(self._after, memory))
        segment = _Segment(memory, post(self._before, memory))
        if self._after is not None:
            self._arriving.append(segment)
        return segment

    def pass_on(self) -> None:
        """What has arrived since the last time."""
        while self._arriving and _has_ended(self._arriving[0].arriving):
            segment = self._arriving.popleft()
            segment.leaving = post(self._after, segment.memory)

    def is_through(self, segment: _Segment) -> bool:
        """Whether this member has nothing to do with it any more."""
        return _has_ended(segment.arriving if self._after is None else segment.leaving)

    def close(self) -> None:
        """Its pairs go here, not with the last traceback of a failed transfer: who lets go of one waits for it."""
        self._before = self._after = None
        self._arriving.clear()


@dataclass
class _ChainFlight:
    chain: Chain
    segments: deque[_Segment]

    def is_done(self) -> bool:
        self.chain.pass_on()
        while self.segments and self.chain.is_through(self.segments[0]):
            self.segments.popleft()
        return not self.segments


def _has_ended(work: dist.Work | None) -> bool:
    """Raises RuntimeError if it failed."""
    if work is None or not work.is_completed():
        return False
    work.wait()  # returns at once; raises what went wrong
    return True
