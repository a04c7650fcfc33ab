"""Broadcasts over gloo along a chain: every member forwards each segment while it receives the next ones.

    rank 0 --> rank 1 --> rank 2 --> ...

gloo's own broadcast is a tree, in which rank 0 sends everything once per level: with five receivers three times, over
the network that all of them wait for. In a chain every member sends it once. A group is a row of pairs, each a gloo
group of its own: torch's gloo can poll a broadcast, but not a single send or receive.
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
"""Bytes of a segment; smaller ones take longer if memory is the limit. A member lags two segments behind the previous
one."""


class GlooChain(Gloo):
    """A `Communicator` that sends from host memory and receives into it without a copy."""

    def group(self, store: Store, rank: int, size: int, lane: Lane, timeout_s: float) -> Chain:
        """Make this member's pairs in the order of the chain, so that members never wait in a circle."""
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
    """One member's place in a chain: a group of two with the previous member, and one with the next."""

    def __init__(self, before: Any, after: Any, *, segment_nbytes: int | None) -> None:
        """`segment_nbytes`: None in a chain of two, where no member forwards."""
        self._before, self._after = before, after
        self._segment_nbytes = segment_nbytes
        self._arriving: deque[_Segment] = deque()
        """Segments to forward, in this order: the next member expects them so."""

    def broadcast(self, memory: torch.Tensor) -> _ChainFlight:
        """Begin to broadcast rank 0's `memory` (uint8) into that of the others. All members call it in one order."""
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
        """Forward the segments that have arrived since the last call."""
        while self._arriving and _has_ended(self._arriving[0].arriving):
            segment = self._arriving.popleft()
            segment.leaving = post(self._after, segment.memory)

    def is_through(self, segment: _Segment) -> bool:
        """Whether this member has received `segment`, and sent it if a member follows."""
        return _has_ended(segment.arriving if self._after is None else segment.leaving)

    def close(self) -> None:
        """Free the pairs here, not with the last traceback of a failed transfer: freeing one blocks the thread."""
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
