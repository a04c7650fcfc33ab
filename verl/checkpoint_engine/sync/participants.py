"""The two kinds of members of a sync, each in the process where its memory is.

`TrainerRank` holds a rank's weight source, `RolloutNode` a node's arena; both hold one instance of the backend. Their
methods are what crosses processes: they take and return records, bytes and numbers. Blocking work runs on one named
thread per member, so that the event loop that calls them goes on answering.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from ..config import CheckpointEngineConfig
from ..errors import PlanError, TransportError, TransportTimeout
from ..memory.arena import NodeArena, require_free_bytes, require_name
from ..memory.digest import Manifest, differing, named, verify
from ..memory.publishing import Publication
from ..memory.threads import memory_threads
from ..plan.delta_choice import DeltaRequest, Encoded, Staging
from ..plan.layout import Layout
from ..plan.member_report import Staged
from ..plan.shards import ShardTable
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology
from ..plan.types import Member
from ..ports import WeightSource
from ..registry import resolve_backend
from ..support.memory import MemoryUse, memory_watch
from ..support.network import host_addresses

T = TypeVar("T")
logger = logging.getLogger(__name__)
REPAIRED_OF = 16
"""At most one of so many pieces is fetched again: where more are wrong, it was no accident on the way."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one trainer rank says about itself: the whole model's layout, its own shards, its host."""

    host: str
    layout_digest: str
    layout: bytes
    """From rank 0 alone: the names of a large model are megabytes, and every rank has the same."""
    shards: bytes
    host_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Published:
    """What one trainer rank has published."""

    nbytes: int
    """Written."""
    seconds: float
    """For which its trainer waited, until it might change its weights."""
    digests: bytes
    """Of its pieces, in plan order."""
    encoded: Encoded | None = None
    """What it did with a `DeltaRequest`."""
    memory: MemoryUse | None = None
    """Of its process, while it copied."""


class MemberPort(Protocol):
    """Any member as the manager sees it, wherever it runs. All methods raise CheckpointEngineError."""

    @property
    def name(self) -> str: ...
    async def ping(self) -> None: ...
    async def connect(self, topology: Topology) -> None: ...
    async def close(self) -> None: ...


def methods_of(port: type) -> set[str]:
    """The names of what can be called on a member that is a `port`, from another process."""
    return {
        name
        for base in port.__mro__
        for name, value in vars(base).items()
        if iscoroutinefunction(value) and not name.startswith("_")
    }


class TrainerPort(MemberPort, Protocol):
    """A trainer rank as the manager sees it."""

    async def describe(self) -> Holding: ...
    async def prepare(self, plan: bytes) -> str: ...
    async def publish(
        self, version: int, slots: Mapping[str, str], waits: bool, deltas: DeltaRequest | None = None
    ) -> None: ...
    async def published(self, version: int) -> Published: ...
    async def serve(self, version: int) -> int: ...


class NodePort(MemberPort, Protocol):
    """A rollout node as the manager sees it."""

    async def check(self, arena_nbytes: int, arenas: int) -> None: ...
    async def prepare(self, plan: bytes) -> Member: ...
    async def begin(self, version: int) -> str: ...
    async def takes_deltas(self, base: int) -> bool: ...
    async def stage(self, version: int) -> Staged: ...
    async def staged(self, version: int) -> Staging: ...
    async def verify(self, version: int, digests: bytes) -> int: ...
    async def commit(self, version: int, digests: bytes) -> None: ...
    async def drop(self) -> None: ...
    async def rollback(self, version: int) -> int | None: ...
    async def reverify(self, version: int) -> None: ...


class _Participant:
    def __init__(self, role: str, index: int, config: CheckpointEngineConfig, host: str | None) -> None:
        self._config = config
        self._member = Member(
            role=role, index=index, host=host or socket.gethostname(), host_addresses=host_addresses()
        )
        self._engine = resolve_backend(config)(member=self._member, config=config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"weight-sync-{self.name}")
        self._interrupting = threading.Lock()

    @property
    def name(self) -> str:
        return self._member.name

    async def ping(self) -> None:
        """Answers whatever the member is doing."""

    async def connect(self, topology: Topology) -> None:
        await self._run_interruptibly(lambda: self._engine.init_process_group(topology))

    async def _run_interruptibly(self, work: Callable[[], T]) -> T:
        """Like `_run`; the thread is free again soon after this is cancelled, and work not yet begun never begins."""
        state = {"running": False, "cancelled": False}

        def unless_cancelled() -> T:
            with self._interrupting:
                if state["cancelled"]:
                    raise TransportError("given up by the manager", member=self.name)
                self._engine.rearm()
                state["running"] = True
            try:
                return work()
            finally:
                with self._interrupting:
                    state["running"] = False

        try:
            return await self._run(unless_cancelled)
        except asyncio.CancelledError:
            with self._interrupting:
                state["cancelled"] = True
                if state["running"]:
                    self._engine.interrupt()
            raise

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class _Copy:
    """One version on its way out of a rank's weights, on the thread of the sync."""

    def __init__(
        self,
        version: int,
        send: Callable[[], Publication],
        encoded: Callable[[], Encoded | None],
        *,
        member: str,
        thread: ThreadPoolExecutor,
        waits: bool,
    ) -> None:
        """`waits`: the trainer does nothing until it is made. `encoded`: is called once it is."""
        self.version = version
        self.trainer_came_s: float | None = None
        """When the trainer asked for its weights back, if it came before they were copied."""
        self._member = member
        self._waits = waits
        self._encoded = encoded
        self._publication: Publication | None = None
        self._ended_s = 0.0
        self.made: Future[None] = thread.submit(self._make, send)
        """Done: the trainer may change its weights."""
        self.published: Future[Published] = thread.submit(self._digest)

    def _make(self, send: Callable[[], Publication]) -> None:
        with memory_watch().during("publish"):
            self._publication = send()
        self._ended_s = time.perf_counter()

    def _digest(self) -> Published:
        if self.made.cancelled():
            raise TransportError("the copy had not begun when the trainer changed its weights", version=self.version)
        self.made.result()  # raises what went wrong
        publication, self._publication = self._publication, None  # and its memory with it
        assert publication is not None  # it was made
        seconds = 0.0
        if self._waits:
            seconds = publication.seconds
        elif self.trainer_came_s is not None:
            seconds = max(self._ended_s - self.trainer_came_s, 0.0)
        return Published(
            nbytes=publication.nbytes,
            seconds=seconds,
            digests=_digests_of(publication),
            encoded=self._encoded(),
            memory=memory_watch().use_of(self._member, "publish"),
        )


class TrainerRank(_Participant):
    """One trainer rank. `source` is borrowed; it is read only inside `describe` and while a publish copies.

    Members with the same `host` share memory; by default it is this machine's name.
    """

    def __init__(
        self, index: int, source: WeightSource, config: CheckpointEngineConfig, *, host: str | None = None
    ) -> None:
        from ..support.device import current_device_setter

        super().__init__("trainer", index, config, host)
        self._thread.submit(current_device_setter())
        self._source = source
        self._prepared = False
        self._copy: _Copy | None = None
        """What was published last."""

    async def describe(self) -> Holding:
        """Specs and shards of this rank. Raises PlanError if they contradict each other."""
        return await self._run(self._describe)

    def _describe(self) -> Holding:
        layout = Layout.of(self._source.specs())
        table = ShardTable.of(layout, self._source.shards())
        return Holding(
            host=self._member.host,
            layout_digest=layout.digest,
            layout=layout.encode() if self._member.index == 0 else b"",
            shards=table.encode(),
            host_addresses=self._member.host_addresses,
        )

    async def prepare(self, plan: bytes) -> str:
        return await self._run(lambda: self._prepare(SyncPlan.decode(plan)))

    def _prepare(self, plan: SyncPlan) -> str:
        self._copy = None
        address = self._engine.prepare(plan, None)
        self._prepared = True
        return address

    async def publish(
        self, version: int, slots: Mapping[str, str], waits: bool = True, deltas: DeltaRequest | None = None
    ) -> None:
        """Copy this rank's pieces into `slots`. `deltas`: what changed since another version may be sent.

        With `waits` this returns when they are copied, and the trainer may change its weights. Otherwise it returns
        when copying has begun, and the trainer calls `await_copied` before it changes them.
        """
        if not self._prepared:
            raise TransportError("it was never prepared", member=self.name)

        def send() -> Publication:
            self._engine.offer_deltas(deltas)
            return self._engine.send_weights(version, self._source, slots)

        copy = self._copy = _Copy(
            version,
            send,
            lambda: self._engine.encoded(version),
            member=self.name,
            thread=self._thread,
            waits=waits,
        )
        if waits:
            await asyncio.wrap_future(copy.made)

    def await_copied(self) -> None:
        """Return when nothing is being copied out of the weights. Called by the thread that trains; blocks it.

        A copy that fails is the manager's business, not the trainer's. One that has not begun within the deadline for
        publishing never does. Raises TransportTimeout for one that has and is not done: it would send half of a later
        step.
        """
        copy, timeout_s = self._copy, self._config.deadlines.publish_s
        if copy is None or copy.made.done():
            return
        copy.trainer_came_s = time.perf_counter()
        _, late = wait([copy.made], timeout_s)
        if late and not copy.made.cancel():
            raise TransportTimeout(
                f"the weights are still being copied {timeout_s:g} s after the trainer wanted to change them",
                version=copy.version,
                phase="publish",
                member=self.name,
            )

    async def published(self, version: int) -> Published:
        """What was published as `version`, once it is copied and digested.

        The trainer may already be changing its weights: it is the copy that is read.
        """
        copy = self._copy
        if copy is None or copy.version != version:
            raise TransportError("that version is not what was published", version=version, member=self.name)
        return await asyncio.shield(asyncio.wrap_future(copy.published))

    async def serve(self, version: int) -> int:
        """Take part in staging, for backends whose senders do; the bytes written into slots.

        The trainer may already be changing its weights.
        """
        return await self._run_interruptibly(lambda: self._engine.serve_weights(version))

    async def close(self) -> None:
        self._copy = None
        await self._run(self._engine.finalize)
        self._thread.shutdown(wait=False)


class RolloutNode(_Participant):
    """One rollout node: owns its arena. `host` as for a trainer rank."""

    def __init__(
        self, index: int, config: CheckpointEngineConfig, *, job: str, shm_dir: Path, host: str | None = None
    ) -> None:
        """Raises ConfigError for a `job` that cannot name a directory."""
        require_name("job", job)
        super().__init__("node", index, config, host)
        self._job = job
        self._shm_dir = shm_dir
        self._plan: SyncPlan | None = None
        self._arena: NodeArena | None = None

    async def check(self, arena_nbytes: int, arenas: int) -> None:
        """Before anything is allocated: is there memory for the host's `arenas`, and what the backend asks of a host?

        Raises ConfigError or BackendUnavailable.
        """
        require_free_bytes(self._shm_dir, arena_nbytes, arenas=arenas)
        self._engine.check_host(self._config)

    async def prepare(self, plan: bytes) -> Member:
        """Create the arena for the plan's layout, unless there is one, and say where it is."""
        return await self._run(lambda: self._prepare(SyncPlan.decode(plan)))

    def _prepare(self, plan: SyncPlan) -> Member:
        if self._arena is not None and self._arena.layout.digest != plan.layout.digest:
            self._arena.close()
            self._arena = None
        if self._arena is None:
            self._arena = NodeArena.create(
                shm_dir=self._shm_dir,
                job=self._job,
                node=self.name,
                layout=plan.layout,
                slots=self._config.slots,
            )
        self._plan = plan
        address = self._engine.prepare(plan, self._arena)
        return replace(self._member, address=address, arena=str(self._arena.directory))

    async def begin(self, version: int) -> str:
        """Open the spare slot for `version`; its path."""
        return await self._run(lambda: str(self._open_arena.begin(version)))

    async def takes_deltas(self, base: int) -> bool:
        """Whether what changed since version `base` is enough for the open slot."""
        return await self._run(lambda: self._engine.takes_deltas(base, self._open_arena))

    async def stage(self, version: int) -> Staged:
        """Return when the open slot holds every byte."""
        return await self._run_interruptibly(lambda: self._stage(version))

    def _stage(self, version: int) -> Staged:
        with memory_watch().during("stage"):
            nbytes = self._engine.receive_weights(version, self._open_arena)
        return Staged(nbytes=nbytes, links=self._engine.links(), memory=memory_watch().use_of(self.name, "stage"))

    async def staged(self, version: int) -> Staging:
        """What `stage` has just done."""
        return await self._run(lambda: self._engine.staging(version))

    async def verify(self, version: int, digests: bytes) -> int:
        """Compare the digests of the open slot; the number of pieces that were wrong and had to be fetched again.

        Raises IntegrityError that names tensor, piece and owner of what stays wrong, or what the backend cannot fetch
        again; TransportError if that fails.
        """
        return await self._run_interruptibly(lambda: self._verify(self._manifest(version, digests)))

    def _verify(self, manifest: Manifest) -> int:
        region = self._open_arena.slot_view().bytes.numpy()
        arrived = self._engine.digests_on_arrival(manifest.version)
        wrong = differing(region, manifest, threads=memory_threads(), arrived=arrived)
        if not wrong:
            return 0
        is_few = len(wrong) <= max(len(manifest.plan) // REPAIRED_OF, 1)
        if is_few and self._engine.repair_weights(manifest.version, self._open_arena, wrong):
            logger.warning(
                "version %d: %s fetched %d pieces again, which were not what the trainer sent: %s",
                manifest.version,
                self.name,
                len(wrong),
                named(manifest.plan, wrong),
            )
        verify(region, manifest, threads=memory_threads(), arrived=self._engine.digests_on_arrival(manifest.version))
        return len(wrong)

    async def commit(self, version: int, digests: bytes) -> None:
        """Make the open slot the current one."""
        await self._run(lambda: self._open_arena.commit(version, self._manifest(version, digests)))

    async def drop(self) -> None:
        """Forget the open slot. Idempotent."""
        await self._run(self._drop)

    def _drop(self) -> None:
        if self._arena is not None:
            self._arena.drop()
        self._engine.close_abandoned()

    async def rollback(self, version: int) -> int | None:
        """Make the previous version current; that version."""
        return await self._run(lambda: self._rollback(version))

    def _rollback(self, version: int) -> int | None:
        arena = self._open_arena
        arena.drop()
        return arena.rollback() if arena.version == version else arena.version

    async def reverify(self, version: int) -> None:
        """Check the committed version again, before an engine loads it long after its sync. Raises IntegrityError."""
        await self._run(lambda: self._open_arena.reverify(version, threads=memory_threads()))

    async def close(self) -> None:
        """Remove the arena."""
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        self._engine.finalize()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @property
    def _open_arena(self) -> NodeArena:
        if self._arena is None:
            raise TransportError("the node has no arena: it was never prepared, or was closed", member=self.name)
        return self._arena

    def _manifest(self, version: int, digests: bytes) -> Manifest:
        if self._plan is None:
            raise PlanError("the node has no plan", version=version, member=self.name)
        return Manifest(version, self._plan, np.frombuffer(digests, np.uint64))


def _digests_of(publication: Publication) -> bytes:
    memory = publication.memory
    return publication.digests.completed(memory.bytes.numpy(), memory.extents, threads=memory_threads()).tobytes()
