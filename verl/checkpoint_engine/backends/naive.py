"""`naive`: trainer ranks and rollout engines share a host, so ranks write straight into the node's spare slot.

There is no wire. Publishing is staging: one copy per byte, by the rank that owns it, all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.checkpoint_engine.arena import NodeArena, SlotView
from verl.checkpoint_engine.base import Capabilities, CheckpointEngineWithCache
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import BackendUnavailable, TransportError
from verl.checkpoint_engine.pipeline import Publication, SlotPieces, publish
from verl.checkpoint_engine.plan import SyncPlan
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.topology import Topology, direct
from verl.checkpoint_engine.types import Member


class NaiveEngine(CheckpointEngineWithCache):
    capabilities = Capabilities(
        staged=False, one_sided=True, elastic=True, same_host=True, device_types=("cpu", "cuda", "npu")
    )

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._plan: SyncPlan | None = None
        self._mapped: dict[str, SlotView] = {}

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        self._unmap(keep=set())
        self._plan = plan
        return str(arena.directory) if arena else ""

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        hosts = sorted({member.host for member in (*trainers, *nodes)})
        if len(hosts) > 1:
            raise BackendUnavailable(
                f"checkpoint_engine.backend=naive needs trainer ranks and rollout nodes on one host; "
                f"these are on {', '.join(hosts)}. Choose a backend that crosses hosts"
            )
        return direct(trainers, nodes)

    def init_process_group(self, topology: Topology) -> None:
        """Nothing to connect: the slots' paths come with every version."""

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._plan is not None  # the manager prepares every member before it publishes
        try:
            self._unmap(keep=self._kept(slots))
            views = [self._view(path) for path in slots.values()]
        except OSError as exc:
            raise TransportError(
                f"cannot map the spare slot: {exc}", version=version, phase="publish", member=self.member.name
            ) from exc
        owner = self.member.index
        return publish(source, self._plan, owner, [SlotPieces(view, self._plan, owner) for view in views])

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        """Publishing wrote the slot already."""
        return 0

    def finalize(self) -> None:
        self._unmap(keep=set())

    def _view(self, path: str) -> SlotView:
        if path not in self._mapped:
            assert self._plan is not None
            self._mapped[path] = SlotView(Path(path), self._plan.layout, writable=True)
        return self._mapped[path]

    @staticmethod
    def _kept(slots: Mapping[str, str]) -> set[str]:
        """Slots still on disk: the current one will be the spare one next time. A replaced slot's memory is let go."""
        directories = {Path(path).parent for path in slots.values()}
        return {str(path) for directory in directories for path in directory.glob("slot-*")}

    def _unmap(self, keep: set[str]) -> None:
        for path in [path for path in self._mapped if path not in keep]:
            self._mapped.pop(path).close()
