"""`naive`: trainer ranks and rollout engines share hosts, so each rank writes into the slots of its host.

On one host no wire is needed: publish writes the slot, one copy per byte by its owner, all ranks at once.
On several hosts, each with ranks and nodes, stage sends every piece to the other hosts: see `host_relay.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint_engine import Capabilities, CheckpointEngineWithCache
from ..config import CheckpointEngineConfig
from ..errors import TransportError
from ..memory.arena import NodeArena
from ..memory.publishing import Publication, SlotPieces, publish
from ..memory.slot import SlotView
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology, across_hosts
from ..plan.types import Member, Shard
from ..ports import WeightSource

if TYPE_CHECKING:
    from ..links.host_relay import HostRelay


class NaiveEngine(CheckpointEngineWithCache):
    capabilities = Capabilities(one_sided=False, same_host=True, device_types=("cpu", "cuda", "npu"))

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._plan: SyncPlan | None = None
        self._mapped: dict[str, tuple[SlotView, SlotPieces]] = {}
        """The slots of this host's nodes by path, and this rank's places in them."""
        self._relay: HostRelay | None = None
        self._here: frozenset[str] = frozenset()
        """Names of the nodes on this host."""
        self._held: Sequence[Shard] = ()
        self._published: tuple[int, list[str]] | None = None
        """Version, and the slots that are to have it. The first has this rank's pieces."""

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        self.finalize()
        self._plan = plan
        if arena is not None:
            return str(arena.directory)
        if plan.num_owners == 1:
            return ""
        from ..links.host_relay import HostRelay

        self._relay = HostRelay(member=self.member, config=self.config, stop=self._stop)
        return self._relay.prepare(plan)

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return across_hosts(trainers, nodes)

    def init_process_group(self, topology: Topology) -> None:
        """Connect ranks of different hosts. Slots need no connection: `send_weights` gets their paths."""
        self._here = frozenset(node.name for node in topology.nodes if node.host == self.member.host)
        if self._relay is None:
            return
        if any(topology.audience.values()):
            self._relay.connect(topology)
        else:  # everybody is on one host: the meeting place is not needed
            self._close_relay()

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._plan is not None  # the manager prepares every member before it publishes
        self._published = None
        paths = [path for name, path in slots.items() if name in self._here]
        if not paths:
            raise TransportError(
                "no slot to write: not connected to any node of this host",
                version=version,
                phase="publish",
                member=self.member.name,
            )
        try:
            self._unmap(keep=self._kept(paths))
            for path in paths:
                self._map(path)
        except OSError as exc:
            raise TransportError(
                f"cannot map the spare slot: {exc}", version=version, phase="publish", member=self.member.name
            ) from exc
        self._held = source.shards()
        publication = publish(source, self._mapped[paths[0]][1])
        self._published = version, paths
        return publication

    def serve_weights(self, version: int) -> int:
        """Copy this rank's pieces from the first slot of this host to its other slots, and send them to other hosts."""
        if self._published is None or self._published[0] != version:
            raise TransportError("the requested version is not the published one", version=version, phase="stage")
        (first, pieces), *others = (self._mapped[path] for path in self._published[1])
        for _, other in others:
            for written, place in zip(pieces.places(self._held), other.places(self._held), strict=True):
                if self._stop.is_set():
                    raise TransportError("given up by the manager", version=version, phase="stage")
                place.tensor.copy_(written.tensor)
        nbytes = len(others) * int(pieces.extents.nbytes.sum())
        if self._relay is not None:
            nbytes += self._relay.exchange(version, [first, *(view for view, _ in others)])
        return nbytes

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        """Does nothing: trainer ranks write the slot."""
        return 0

    def finalize(self) -> None:
        self._published = None
        self._unmap(keep=set())
        self._close_relay()

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _map(self, path: str) -> None:
        if path not in self._mapped:
            assert self._plan is not None
            view = SlotView(Path(path), self._plan.layout, writable=True)
            view.pin(self._plan.extents_of(self.member.index).spans)
            self._mapped[path] = view, SlotPieces(view, self._plan, self.member.index)

    @staticmethod
    def _kept(paths: Sequence[str]) -> set[str]:
        """Slots still on disk: the current one will be the spare one next time. A replaced slot's memory is let go."""
        directories = {Path(path).parent for path in paths}
        return {str(path) for directory in directories for path in directory.glob("slot-*")}

    def _unmap(self, keep: set[str]) -> None:
        for path in [path for path in self._mapped if path not in keep]:
            view, _ = self._mapped.pop(path)
            view.close()
