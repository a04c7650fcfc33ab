"""The Ray actor that owns the memory in which the trainer ranks of its host leave their state.

Where ranks are on several hosts it also has a copy of what another host's keeper owns, read through the `tcp` backend's
wire. What new ranks on another host need is brought there in the same way; another number of ranks reads its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verl.checkpoint_engine.backends.tcp import TcpWire
from verl.checkpoint_engine.errors import ConfigError, IntegrityError
from verl.checkpoint_engine.memory.arena import NodeArena, require_free_bytes
from verl.checkpoint_engine.memory.digest import Manifest, verify
from verl.checkpoint_engine.memory.host_memory import free_host_nbytes
from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.checkpoint_engine.support.admission import Admission
from verl.utils.lifetime import begin_actor
from verl.workers.memory_checkpoint.reading import read_into

SLOTS = 2
"""A step that is being copied, and the one before it."""
MOST_OF_FREE = 0.5
"""Of the host's free memory: the rest is for what a run allocates later."""
CONNECTIONS = 4
FETCHED_WITHIN_S = 120.0


@dataclass(frozen=True)
class Lent:
    """States of one step that others may read."""

    wire: bytes
    places: Mapping[int, tuple[int, int]]
    """By rank: where it lies in its owner's memory, and how many bytes."""
    digests: Mapping[int, bytes]
    plans: Mapping[int, bytes]
    """If they were asked for."""


@dataclass
class _States:
    """Of some ranks, an arena each."""

    prefix: str
    arenas: dict[int, NodeArena] = field(default_factory=dict)
    plans: dict[int, SyncPlan] = field(default_factory=dict)

    def steps(self) -> dict[int, list[int]]:
        """Those of which each rank's state is here."""
        return {
            rank: [step for step in (arena.version, arena.previous_version) if step is not None]
            for rank, arena in self.arenas.items()
        }

    def go_to(self, step: int, ranks: Collection[int]) -> None:
        """Give up what is of a later step. Raises IntegrityError if `step` is not here."""
        for rank in ranks:
            arena = self.arenas[rank]
            arena.drop()
            if arena.version != step and arena.previous_version == step:
                arena.rollback()
            if arena.version != step:
                raise IntegrityError(f"the state of rank {rank} here is that of step {arena.version}", version=step)

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()
        self.arenas = {}


class StateKeeper:
    """One per host with trainer ranks. Called by `MemoryCheckpoint` on the driver, one call at a time.

    The memory goes when the actor does, however it ends.
    """

    def __init__(
        self,
        *,
        job: str,
        shm_dir: str,
        address: str = "127.0.0.1",
        free_nbytes: Callable[[], int] = free_host_nbytes,
    ) -> None:
        """`address`: of this host, as others reach it."""
        begin_actor()
        self._free_nbytes = free_nbytes
        self._job, self._shm_dir = job, Path(shm_dir)
        self._address = address
        self._own, self._copies = _States("state"), _States("copy")
        self._wire: TcpWire | None = None
        self._lent: dict[bool, list[np.ndarray]] = {}
        """Of what this host's ranks left (false), and of copies (true)."""

    def reserve(self, plans: Mapping[int, bytes]) -> int:
        """An arena for each rank, for a state that its plan describes; the bytes of all of them.

        Raises ConfigError if that is more than this host can spare.
        """
        return self._reserve(self._own, plans)

    def _reserve(self, states: _States, plans: Mapping[int, bytes]) -> int:
        decoded = {rank: SyncPlan.decode(plan) for rank, plan in plans.items() if rank not in states.arenas}
        needed = SLOTS * sum(plan.layout.nbytes for plan in decoded.values())
        require_free_bytes(self._shm_dir, needed)
        if needed > (most := MOST_OF_FREE * self._free_nbytes()):
            raise ConfigError(
                f"{needed / 2**30:.2f} GiB are more than half of the host's free memory, {most / 2**30:.2f} GiB"
            )
        for rank, plan in decoded.items():
            states.arenas[rank] = NodeArena.create(
                shm_dir=self._shm_dir, job=self._job, node=f"{states.prefix}-{rank}", layout=plan.layout, slots=SLOTS
            )
            states.plans[rank] = plan
        return needed

    def begin(self, step: int) -> dict[int, str]:
        """Open the spare slots for the state after `step`; their paths, by rank."""
        return {rank: str(arena.begin(step)) for rank, arena in self._own.arenas.items()}

    def commit(self, step: int, digests: Mapping[int, bytes]) -> None:
        """The open slots hold it, and every rank of the run has left its part."""
        for rank, arena in self._own.arenas.items():
            arena.commit(step, Manifest(step, self._own.plans[rank], np.frombuffer(digests[rank], np.uint64)))

    def arenas_of(self, step: int) -> dict[int, str]:
        """Where ranks find what they left after `step`. What this host has of a later step is given up: others lack it.

        Raises IntegrityError if it is not here.
        """
        self._own.go_to(step, self._own.arenas)
        return {rank: str(arena.directory) for rank, arena in self._own.arenas.items()}

    def steps(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By rank, the steps of which its state is here: of this host's own ranks, and of copies."""
        return self._own.steps(), self._copies.steps()

    def lend(
        self,
        step: int,
        ranks: Collection[int],
        *,
        to: Collection[str],
        copies: bool = False,
        with_plans: bool = False,
    ) -> Lent:
        """Let processes on the hosts `to`, by their addresses, read what `ranks` left after `step`, or the `copies`
        that are here, until the next call that changes it. Raises as `arenas_of`."""
        states = self._copies if copies else self._own
        states.go_to(step, ranks)
        if self._wire is None:
            self._wire = TcpWire(self._address, CONNECTIONS)
        self._wire.admit(Admission(addresses=tuple(address for address in to if address != self._address)))
        for memory in self._lent.pop(copies, []):
            self._wire.deregister(memory)
        lent, places, digests = self._lent.setdefault(copies, []), {}, {}
        for rank in ranks:
            committed = states.arenas[rank].base()
            assert committed is not None  # `go_to` has looked
            manifest, view = committed
            memory = view.bytes.numpy()
            self._wire.register(memory)
            lent.append(memory)
            places[rank] = memory.ctypes.data, memory.nbytes
            digests[rank] = manifest.digests.tobytes()
        plans = {rank: states.plans[rank].encode() for rank in ranks} if with_plans else {}
        return Lent(self._wire.address(), places, digests, plans)

    def fetch(self, step: int, lent: Lent, *, own: bool = False) -> int:
        """Read what another keeper lends, as this host's `own` or as copies; the bytes. All of it is there, or nothing
        of it is.

        Raises TransportError, IntegrityError; ConfigError if this host cannot spare the memory.
        """
        states = self._own if own else self._copies
        self._reserve(states, lent.plans)
        wire = TcpWire(self._address, CONNECTIONS, listens=False)
        try:
            wire.connect(0, lent.wire, FETCHED_WITHIN_S)
            manifests = {}
            for rank, (address, _) in lent.places.items():
                arena = states.arenas[rank]
                arena.begin(step)
                slot = arena.writable_view().bytes.numpy()
                read_into(slot, wire, address, timeout_s=FETCHED_WITHIN_S)
                digests = np.frombuffer(lent.digests[rank], np.uint64)
                manifests[rank] = Manifest(step, states.plans[rank], digests)
                verify(slot, manifests[rank], threads=memory_threads())
            for rank, manifest in manifests.items():
                states.arenas[rank].commit(step, manifest)
        finally:
            wire.close()
            for rank in lent.places:
                states.arenas[rank].drop()
        return sum(nbytes for _, nbytes in lent.places.values())

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self._wire is not None:
            self._wire.close()
            self._wire, self._lent = None, {}
        self._own.close()
        self._copies.close()
