"""The parity of other hosts' states, with which a group survives the loss of any one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from verl.checkpoint_engine.backends.tcp import TcpWire
from verl.checkpoint_engine.links.wire import UInt8s
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.digest import Manifest, digest_pieces
from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.workers.memory_checkpoint.lent import Lent
from verl.workers.memory_checkpoint.reading import read_into, require_pieces
from verl.workers.memory_checkpoint.stripes import RUN_NBYTES, Stripes

BLOCK_NBYTES = 2**20


class Parity:
    """The parity of one host, in two slots like the states: always complete, for one step or the step before."""

    def __init__(
        self, members: Sequence[Mapping[int, SyncPlan]], number: int, *, shm_dir: Path, job: str, slots: int
    ) -> None:
        """This host is member `number`. Raises ConfigError without enough memory."""
        self._members, self._number = members, number
        self._stripes = Stripes(members)
        layout = Layout.of([TensorSpec(name="parity", shape=(self._stripes.nbytes,), dtype="uint8")])
        whole = ShardTable.of(layout, [Shard("parity", Box.whole((self._stripes.nbytes,)))])
        self._plan = make_plan(layout, [whole], block_nbytes=BLOCK_NBYTES)
        self.arena = NodeArena.create(shm_dir=shm_dir, job=job, node="parity", layout=layout, slots=slots)

    @staticmethod
    def nbytes_of(members: Sequence[Mapping[int, SyncPlan]]) -> int:
        """Bytes of one slot."""
        return Stripes(members).nbytes

    def take(self, step: int, wire: TcpWire, lent: Sequence[Lent]) -> None:
        """Read the states that others lend after `step`, compare digests, and add them up. All or none is kept.

        `wire` is connected to the members, by their numbers. Raises TransportError, IntegrityError.
        """
        self.arena.begin(step)
        try:
            slot = self.arena.writable_view().bytes.numpy()
            slot[:] = 0
            beside = _memory_beside()
            for other, plans in enumerate(self._members):
                for run in self._stripes.of(other, self._number) if other != self._number else ():
                    part = beside[: run.nbytes]
                    read_into(part, wire, lent[other].places[run.rank][0] + run.offset, member=other)
                    pieces = np.arange(run.pieces.start, run.pieces.stop)
                    left = lent[other].digests[run.rank]
                    require_pieces(part, run.offset, plans[run.rank], pieces, left, run.rank)
                    slot[run.at : run.at + run.nbytes] ^= part
            digests = digest_pieces(slot, self._plan.extents, threads=memory_threads())
            self.arena.commit(step, Manifest(step, self._plan, digests))
        finally:
            self.arena.drop()


def rebuild(
    slots: Mapping[int, UInt8s],
    members: Sequence[Mapping[int, SyncPlan]],
    lost: int,
    wire: TcpWire,
    lent: Mapping[int, Lent],
) -> None:
    """Fill the slots of the ranks of the member `lost` from the states and parity that the others lend.

    The caller verifies the slots. Raises TransportError.
    """
    stripes, beside = Stripes(members), _memory_beside()
    for holder, at_holder in lent.items():
        assert at_holder.parity is not None  # it was asked for
        for run in stripes.of(lost, holder):
            if run.rank not in slots:
                continue
            part = slots[run.rank][run.offset : run.offset + run.nbytes]
            read_into(part, wire, at_holder.parity + run.at, member=holder)
            for other in lent.keys() - {holder}:
                for rank, offset, at, nbytes in stripes.within(other, holder, run.at, run.at + run.nbytes):
                    values = beside[:nbytes]
                    read_into(values, wire, lent[other].places[rank][0] + offset, member=other)
                    part[at - run.at : at - run.at + nbytes] ^= values


def _memory_beside() -> UInt8s:
    return np.empty(RUN_NBYTES, np.uint8)
