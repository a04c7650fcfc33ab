"""The interface of backends, which bring bytes from trainer ranks into the spare slots of rollout nodes.

Every member has one instance. The manager calls it (through `sync/participant.py`) in this order:

    every trainer rank and node     prepare                 register memory, return the address
    driver                          build_topology          decide which member sends to which
    every trainer rank and node     init_process_group      connect
    for every version
        every node                  takes_deltas            whether it can use deltas; not for one-sided backends
        every trainer rank          send_weights            publish: copy the rank's own pieces, which are digested then
        every node                  receive_weights         stage: fill the spare slot
        a node                      repair_weights          fetch pieces again that arrived wrong
        every trainer rank          serve_weights           send in stage; not for one-sided backends
        every node                  close_abandoned         after a failure: close what is slow to close
    every trainer rank and node     finalize                disconnect, release memory
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .config import CheckpointEngineConfig
from .memory.arena import NodeArena
from .memory.committed import read_committed
from .memory.digest import PieceDigests
from .memory.publishing import Publication
from .plan.delta_choice import DeltaRequest, Encoded, Staging
from .plan.member_report import Link
from .plan.sync_plan import SyncPlan
from .plan.topology import Topology
from .plan.types import Member
from .ports import WeightSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do. The manager matches it against the job; code never tests a backend's name."""

    one_sided: bool
    """Nodes fetch by themselves; trainer ranks do nothing in stage."""
    same_host: bool
    """Every rollout node must share a host, and memory, with a trainer rank."""
    device_types: tuple[str, ...]
    """Devices from whose memory it can read weights."""
    late_nodes: bool = False
    """A node alone can fetch the last published version at any time; trainer ranks do nothing."""
    topologies: tuple[str, ...] = ("direct",)
    """The values of `checkpoint_engine.topology` that it can follow; `build_topology` makes the first."""
    deltas: bool = False
    """It can move deltas: `checkpoint_engine.delta`."""
    connects_once: bool = False
    """The manager prepares and connects members again for every version."""


NOBODY, DEFAULTS = Member(role="", index=0, host=""), CheckpointEngineConfig()


class CheckpointEngine(ABC):
    """One backend on one member. Methods block; each is called from one thread at a time."""

    capabilities: ClassVar[Capabilities]
    options_class: ClassVar[type[Any] | None] = None
    """Dataclass of `checkpoint_engine.engine_kwargs.<name>`; the driver checks the options against it."""

    def __init__(self, *, member: Member = NOBODY, config: CheckpointEngineConfig = DEFAULTS) -> None:
        """Engines written for verl call it without arguments; see `backends/verl_engine.py`."""
        self.member = member
        self.config = config
        self._stop = threading.Event()

    @abstractmethod
    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        """Register memory and return the address under which peers reach this member. Once per plan.

        Called on every member; `arena` is the node's own, None on trainer ranks. Raises TransportError.
        """

    @classmethod  # noqa: B027 - most backends ask for nothing
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        """Raises ConfigError or BackendUnavailable if this host lacks something that `config` requires.

        Called on every rollout node before its engines start, and on the driver where all members are on its host.
        """

    @classmethod
    @abstractmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        """Decide which member sends to which. Pure; called on the driver. Raises BackendUnavailable if it cannot."""

    @abstractmethod
    def init_process_group(self, topology: Topology) -> None:
        """Connect to the peers that `topology` gives this member. Called on every member. Raises TransportError."""

    def offer_deltas(self, request: DeltaRequest | None) -> None:  # noqa: B027 - most backends send in full
        """Let the next `send_weights` send a delta to an earlier version, if it can; None: send the whole version.

        Called on every trainer rank before `send_weights`, of backends that can move `deltas`.
        """

    def encoded(self, version: int) -> Encoded | None:
        """How `send_weights` answered the offer; None without one."""
        return None

    def takes_deltas(self, base: int, arena: NodeArena) -> bool:
        """Whether this node can build the next version from version `base`, which it received before.

        Called on every node once its slot is open, for backends that are not one-sided and can move deltas. All nodes
        receive the same bytes. So ranks send deltas if all nodes can use them, and not again after a failure.
        """
        return False

    @abstractmethod
    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        """Publish: copy this rank's pieces from `source`; the trainer may change its weights when this returns.

        Called on every trainer rank. `slots` has the path of the spare slot of every node if the backend asks for the
        `same_host`; otherwise it is empty, and nodes open theirs meanwhile. Raises TransportError.
        """

    def serve_weights(self, version: int) -> int:
        """Send the copy of `send_weights` while nodes stage `version`; the trainer continues meanwhile.

        Called on every trainer rank, on the sync's own thread, while nodes are in `receive_weights`; only for backends
        that are not one-sided. Returns the bytes that this rank wrote into slots; nodes count the bytes they receive.
        Raises TransportError.
        """
        return 0

    def interrupt(self) -> None:
        """Make a running `init_process_group`, `serve_weights` or `receive_weights` raise soon; does not wait for it.

        Called on any member, from another thread. These methods check `_stop`; only `rearm` clears it.
        """
        self._stop.set()

    def rearm(self) -> None:
        """Forget an earlier `interrupt`. The caller that may interrupt one of those methods calls this first."""
        self._stop.clear()

    @abstractmethod
    def receive_weights(self, version: int, arena: NodeArena) -> int:
        """Stage: fill the open slot of `arena` with `version`; return the bytes moved.

        Called on every node. Raises TransportError.
        """

    def staging(self, version: int) -> Staging:
        """How `receive_weights` staged `version`, if deltas were offered. Called on every node after it."""
        return Staging()

    def links(self) -> tuple[Link, ...]:
        """The bytes that the last `receive_weights` read from each peer, if known. Called on nodes after it."""
        return ()

    def digests_on_arrival(self, version: int) -> PieceDigests | None:
        """The digests that `receive_weights` made of `version` in the slot, each after the last byte of its piece.

        Called on every node after `receive_weights`. The node then digests the other pieces, by default all.
        """
        return None

    def repair_weights(self, version: int, arena: NodeArena, pieces: Sequence[int]) -> bool:
        """Fetch `pieces` (rows of the plan) that arrived wrong into the open slot again; False if it cannot.

        Called on a node after `receive_weights`. Raises TransportError.
        """
        return False

    def close_abandoned(self) -> None:  # noqa: B027 - most backends leave nothing
        """Close connections that a failed `receive_weights` left open, because it raises without waiting for them.

        Called on every node when its slot is dropped, after the failure has been reported.
        """

    @abstractmethod
    def finalize(self) -> None:
        """Disconnect and release the memory of `prepare` and `init_process_group`. Idempotent."""


class CheckpointEngineWithCache(CheckpointEngine):
    """A backend whose nodes keep the committed version, so that an engine can (re)load without the trainer."""

    def get_weights(self, arena_path: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor) of the committed `version`; tensors are borrowed until the iterator ends.

        Called on a rollout node, by any process of that host. Raises IntegrityError if `version` is not committed.
        """
        return read_committed(arena_path, version)
