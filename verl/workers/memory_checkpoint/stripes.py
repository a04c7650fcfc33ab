"""The parity scheme of a group of hosts, which survives the loss of any one. No I/O.

    member    a host: its ranks' states, one after the other, in as many stripes as there are other members
    holder    has the XOR of one stripe of every other member: their parity

Each stripe of a lost member is a holder's parity less the other members' stripes in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verl.checkpoint_engine.plan.sync_plan import SyncPlan

RUN_NBYTES = 2**26
WORD_NBYTES = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive bytes of one rank's state, as a part of a parity."""

    rank: int
    offset: int
    """The offset in the rank's state."""
    at: int
    """The offset in the parity."""
    nbytes: int
    pieces: range
    """Pieces of the rank's plan, all whole."""


class Stripes:
    """The stripes of one group. Every host computes the same ones from the same plans."""

    def __init__(self, members: Sequence[Mapping[int, SyncPlan]]) -> None:
        """`members`: the plans of each one's ranks. Each rank is the only owner in its plan."""
        others = len(members) - 1
        self._runs = {
            (number, (number + 1 + index) % len(members)): runs
            for number, plans in enumerate(members)
            for index, runs in enumerate(_divided(plans, others))
        }
        longest = max((runs[-1].at + runs[-1].nbytes for runs in self._runs.values() if runs), default=0)
        self.nbytes = -(-longest // WORD_NBYTES) * WORD_NBYTES
        """Of each parity."""

    def of(self, member: int, holder: int) -> list[Run]:
        """The stripe of `member` that is in the parity of `holder`."""
        return self._runs[member, holder]

    def within(self, member: int, holder: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """The stripe's runs between two places of the parity: (rank, offset in its state, place, bytes)."""
        for run in self.of(member, holder):
            low, high = max(start, run.at), min(stop, run.at + run.nbytes)
            if low < high:
                yield run.rank, run.offset + low - run.at, low, high - low


def _divided(plans: Mapping[int, SyncPlan], number: int) -> list[list[Run]]:
    """All that the ranks left in `number` parts of about the same length, cut where pieces begin."""
    total = sum(plan.layout.nbytes for plan in plans.values())
    parts: list[list[Run]] = [[] for _ in range(number)]
    before = 0
    for rank, plan in plans.items():
        assert (plan.extents.rows == 1).all()  # of whole tensors, which lie in one run each
        starts = plan.extents.offset.tolist()
        starts[:1] = [0]
        for piece, (start, stop) in enumerate(zip(starts, [*starts[1:], plan.layout.nbytes], strict=True)):
            runs = parts[(2 * before + stop - start) * number // (2 * total)]  # that in which its middle is
            before += stop - start
            last = runs[-1] if runs else None
            if last and last.rank == rank and last.pieces.stop == piece and last.nbytes + stop - start <= RUN_NBYTES:
                runs[-1] = Run(rank, last.offset, last.at, stop - last.offset, range(last.pieces.start, piece + 1))
            else:
                runs.append(
                    Run(rank, start, last.at + last.nbytes if last else 0, stop - start, range(piece, piece + 1))
                )
    return parts
