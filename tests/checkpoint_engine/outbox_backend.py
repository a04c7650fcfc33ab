"""A backend as a user would write one: ranks publish into a file of their own, nodes copy out of those files later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWithCache
from verl.checkpoint_engine.base import Capabilities
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.publishing import Publication, SlotPieces, publish
from verl.checkpoint_engine.memory.slot import SlotView
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.checkpoint_engine.plan.topology import Topology, direct
from verl.checkpoint_engine.plan.types import Member
from verl.checkpoint_engine.ports import WeightSource


@CheckpointEngineRegistry.register("outbox")
class OutboxEngine(CheckpointEngineWithCache):
    capabilities = Capabilities(one_sided=True, same_host=True, device_types=("cpu",))

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        self.plan = plan
        return ""

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return direct(trainers, nodes)

    def init_process_group(self, topology: Topology) -> None:
        pass

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        outbox = Path(next(iter(slots.values()))).with_name(f"outbox-{self.member.index}")
        outbox.write_bytes(bytes(self.plan.layout.nbytes))
        view = SlotView(outbox, self.plan.layout, writable=True)
        return publish(source, SlotPieces(view, self.plan, self.member.index))

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        slot = SlotView(arena.slot_view().path, self.plan.layout, writable=True).bytes.numpy()
        extents, moved = self.plan.extents, 0
        for owner in range(self.plan.num_owners):
            outbox = np.fromfile(arena.directory / f"outbox-{owner}", np.uint8)
            for piece in range(int(self.plan.first[owner]), int(self.plan.first[owner + 1])):
                for row in range(int(extents.rows[piece])):
                    start = int(extents.offset[piece] + row * extents.stride[piece])
                    stop = start + int(extents.run_nbytes[piece])
                    slot[start:stop] = outbox[start:stop]
                    moved += stop - start
        return moved

    def finalize(self) -> None:
        pass
