"""The Ray actor that owns the memory with the states of its host's trainer ranks.

With several hosts it also keeps parity of the states of other hosts, which it reads over the wire `tcp`. States for new
ranks on another host travel in the same way; another number of ranks reads its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verl.checkpoint_engine.backends.tcp import TcpWire
from verl.checkpoint_engine.errors import ConfigError, IntegrityError
from verl.checkpoint_engine.links.wire import UInt8s
from verl.checkpoint_engine.memory.arena import NodeArena, require_free_bytes
from verl.checkpoint_engine.memory.digest import Manifest, verify
from verl.checkpoint_engine.memory.host_memory import free_host_nbytes
from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.checkpoint_engine.support.admission import Admission
from verl.utils.lifetime import begin_actor
from verl.workers.memory_checkpoint.lent import Lent
from verl.workers.memory_checkpoint.parity import Parity, rebuild
from verl.workers.memory_checkpoint.reading import CONNECTIONS, connected, read_into

SLOTS = 2
"""One for the step that is being copied, and one for the step before it."""
MOST_OF_FREE = 0.5
"""The most of the host's free memory to use: the run allocates from the rest later."""


@dataclass
class _States:
    """Of some ranks, an arena each."""

    prefix: str
    arenas: dict[int, NodeArena] = field(default_factory=dict)
    plans: dict[int, SyncPlan] = field(default_factory=dict)

    def steps(self) -> dict[int, list[int]]:
        """Those of which each rank's state is here."""
        return {rank: _steps(arena) for rank, arena in self.arenas.items()}

    def go_to(self, step: int, ranks: Collection[int]) -> None:
        for rank in ranks:
            _go_to(self.arenas[rank], step, f"state of rank {rank}")

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()
        self.arenas = {}


class StateKeeper:
    """The keeper of one host with trainer ranks. `MemoryCheckpoint` on the driver calls it, one call at a time.

    Its memory is freed when the actor ends, even if killed.
    """

    def __init__(
        self,
        *,
        job: str,
        shm_dir: str,
        address: str = "127.0.0.1",
        free_nbytes: Callable[[], int] = free_host_nbytes,
    ) -> None:
        """`address`: the address at which other hosts reach this one."""
        begin_actor()
        self._free_nbytes = free_nbytes
        self._job, self._shm_dir = job, Path(shm_dir)
        self._address = address
        self._own, self._rebuilt = _States("state"), _States("rebuilt")
        self._parity: Parity | None = None
        self._wire: TcpWire | None = None
        self._lent: dict[int, UInt8s] = {}
        """By address."""

    def reserve(self, plans: Mapping[int, bytes]) -> int:
        """Make an arena for each rank, for the state of its plan; return their bytes together.

        Raises ConfigError if this host has not enough free memory.
        """
        return self._reserve(self._own, plans)

    def _reserve(self, states: _States, plans: Mapping[int, bytes], slots: int = SLOTS) -> int:
        decoded = {rank: SyncPlan.decode(plan) for rank, plan in plans.items() if rank not in states.arenas}
        needed = slots * sum(plan.layout.nbytes for plan in decoded.values())
        self._require(needed)
        for rank, plan in decoded.items():
            states.arenas[rank] = NodeArena.create(
                shm_dir=self._shm_dir, job=self._job, node=f"{states.prefix}-{rank}", layout=plan.layout, slots=slots
            )
            states.plans[rank] = plan
        return needed

    def _require(self, nbytes: int) -> None:
        require_free_bytes(self._shm_dir, nbytes)
        if nbytes > (most := MOST_OF_FREE * self._free_nbytes()):
            raise ConfigError(
                f"{nbytes / 2**30:.2f} GiB are more than half of the host's free memory, {most / 2**30:.2f} GiB"
            )

    def begin(self, step: int) -> dict[int, str]:
        """Open the spare slots for the state after `step`; return their paths by rank."""
        return {rank: str(arena.begin(step)) for rank, arena in self._own.arenas.items()}

    def commit(self, step: int, digests: Mapping[int, bytes]) -> None:
        """Commit the open slots. Called after every rank of the run has copied its state."""
        for rank, arena in self._own.arenas.items():
            arena.commit(step, Manifest(step, self._own.plans[rank], np.frombuffer(digests[rank], np.uint64)))

    def arenas_of(self, step: int) -> dict[int, str]:
        """The arenas with the ranks' states after `step`. Drops later states, which other hosts lack.

        Raises IntegrityError if this host has no such state.
        """
        self._own.go_to(step, self._own.arenas)
        return {rank: str(arena.directory) for rank, arena in self._own.arenas.items()}

    def steps(self) -> tuple[dict[int, list[int]], list[int]]:
        """The steps of each rank's states on this host, by rank, and the steps of its parity."""
        return self._own.steps(), _steps(self._parity.arena) if self._parity is not None else []

    def lend(
        self,
        step: int,
        ranks: Collection[int],
        *,
        to: Collection[str],
        rebuilt: bool = False,
        with_plans: bool = False,
        with_parity: bool = False,
    ) -> Lent:
        """Let processes on the hosts `to` (addresses) read the states of `ranks` after `step`, until the next call that
        changes them. Raises as `arenas_of`."""
        states = self._rebuilt if rebuilt else self._own
        states.go_to(step, ranks)
        if self._wire is None:
            self._wire = TcpWire(self._address, CONNECTIONS)
        self._wire.admit(Admission(addresses=tuple(address for address in to if address != self._address)))
        if not rebuilt:
            for memory in self._lent.values():
                self._wire.deregister(memory)
            self._lent = {}
        places, digests = {}, {}
        for rank in ranks:
            manifest, memory = self._registered(states.arenas[rank])
            places[rank] = memory.ctypes.data, memory.nbytes
            digests[rank] = manifest.digests.tobytes()
        plans = {rank: states.plans[rank].encode() for rank in ranks} if with_plans else {}
        parity: int | None = None
        if with_parity:
            assert self._parity is not None  # `steps` has told
            _go_to(self._parity.arena, step, "parity")
            parity = self._registered(self._parity.arena)[1].ctypes.data
        return Lent(self._wire.address(), places, digests, plans, parity)

    def _registered(self, arena: NodeArena) -> tuple[Manifest, UInt8s]:
        """What has been committed there, for others to read."""
        committed = arena.base()
        assert committed is not None and self._wire is not None  # `_go_to` has looked
        manifest, view = committed
        memory = view.bytes.numpy()
        self._wire.register(memory)
        self._lent[memory.ctypes.data] = memory
        return manifest, memory

    def protect(self, step: int, number: int, *lent: Lent) -> int:
        """Read the states that a group's members lend after `step`, and keep their parity; return its bytes. This host
        is member `number`. The parity is complete or dropped.

        Raises TransportError, IntegrityError; ConfigError if this host has not enough memory. The first time the
        members must also lend their plans.
        """
        if self._parity is None:
            members = [{rank: SyncPlan.decode(plan) for rank, plan in one.plans.items()} for one in lent]
            self._require(SLOTS * Parity.nbytes_of(members))
            self._parity = Parity(members, number, shm_dir=self._shm_dir, job=self._job, slots=SLOTS)
        others = {other: one.wire for other, one in enumerate(lent) if other != number}
        with connected(self._address, others) as wire:
            self._parity.take(step, wire, lent)
        return self._parity.arena.nbytes

    def fetch(self, step: int, lent: Lent, ranks: Collection[int]) -> None:
        """Read what `ranks` left, which another keeper lends with plans, as what this host's left. All of it is there,
        or nothing of it is. Raises as `protect`."""
        self._reserve(self._own, {rank: lent.plans[rank] for rank in ranks})
        with (
            connected(self._address, {0: lent.wire}) as wire,
            self._filling(self._own, step, ranks, lent.digests) as slots,
        ):
            for rank, slot in slots.items():
                read_into(slot, wire, lent.places[rank][0])

    def rebuild(
        self,
        step: int,
        members: Sequence[Mapping[int, bytes]],
        lost: int,
        digests: Mapping[int, bytes],
        *lent: Lent,
        as_own: bool,
    ) -> None:
        """Make what ranks of the member `lost` left, those with `digests`, of what the other members lend, in their
        order, with parity. `members`: the plans of each one's ranks. As `fetch`."""
        states = self._own if as_own else self._rebuilt
        self._reserve(states, {rank: members[lost][rank] for rank in digests}, SLOTS if as_own else 1)
        plans = [{rank: SyncPlan.decode(plan) for rank, plan in one.items()} for one in members]
        others = dict(zip([number for number in range(len(members)) if number != lost], lent, strict=True))
        wires = {number: one.wire for number, one in others.items()}
        with connected(self._address, wires) as wire, self._filling(states, step, digests, digests) as slots:
            rebuild(slots, plans, lost, wire, others)

    @contextmanager
    def _filling(
        self, states: _States, step: int, ranks: Collection[int], digests: Mapping[int, bytes]
    ) -> Iterator[dict[int, UInt8s]]:
        """Slots to fill with the states after `step`; afterwards all of them are right and committed, or none is."""
        arenas = {rank: states.arenas[rank] for rank in ranks}
        try:
            for arena in arenas.values():
                arena.begin(step)
            slots = {rank: arena.writable_view().bytes.numpy() for rank, arena in arenas.items()}
            yield slots
            manifests = {
                rank: Manifest(step, states.plans[rank], np.frombuffer(digests[rank], np.uint64)) for rank in ranks
            }
            for rank, manifest in manifests.items():
                verify(slots[rank], manifest, threads=memory_threads())
            for rank, manifest in manifests.items():
                arenas[rank].commit(step, manifest)
        finally:
            for arena in arenas.values():
                arena.drop()

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self._wire is not None:
            self._wire.close()
            self._wire, self._lent = None, {}
        self._own.close()
        self._rebuilt.close()
        if self._parity is not None:
            self._parity.arena.close()
            self._parity = None


def _steps(arena: NodeArena) -> list[int]:
    return [step for step in (arena.version, arena.previous_version) if step is not None]


def _go_to(arena: NodeArena, step: int, what: str) -> None:
    """Give up what is of a later step. Raises IntegrityError if `step` is not here."""
    arena.drop()
    if arena.version != step and arena.previous_version == step:
        arena.rollback()
    if arena.version != step:
        raise IntegrityError(f"the {what} here is that of step {arena.version}", version=step)
