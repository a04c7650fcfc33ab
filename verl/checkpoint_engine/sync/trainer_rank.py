"""A trainer rank as a member of syncs: it copies its shards and digests the copy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ..config import CheckpointEngineConfig
from ..errors import TransportError, TransportTimeout
from ..memory.publishing import Publication
from ..memory.threads import memory_threads
from ..plan.delta_choice import DeltaRequest, Encoded
from ..plan.layout import Layout
from ..plan.shards import ShardTable
from ..plan.sync_plan import SyncPlan
from ..ports import WeightSource
from ..support.memory import memory_watch
from .members import Holding, Published
from .participant import Participant


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
        """When it is done, the trainer may change its weights."""
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


class TrainerRank(Participant):
    """One trainer rank. `source` is borrowed; it is read only inside `describe` and while a publish copies.

    Members with the same `host` share memory; by default it is this machine's name.
    """

    def __init__(
        self, index: int, source: WeightSource, config: CheckpointEngineConfig, *, host: str | None = None
    ) -> None:
        from ..support.device import current_device_setter
        from ..support.locality import own_gpu, stay_near

        super().__init__("trainer", index, config, host)
        self._thread.submit(current_device_setter())
        self._thread.submit(stay_near, own_gpu())
        self._source = source
        self._prepared = False
        self._copy: _Copy | None = None
        """The last publish."""

    async def describe(self) -> Holding:
        """Return the model's layout and this rank's shards. Raises PlanError if they contradict each other."""
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
        """Copy this rank's pieces into the nodes' `slots` (name to path) or the backend's region. With `deltas` it may
        send a delta. Raises TransportError if the rank was never prepared.

        With `waits` this returns when the copy is made; the trainer may then change its weights. Otherwise it returns
        at once, and the trainer calls `await_copied` before it changes them.
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
        """Return when no copy of the weights is running. The training thread calls it and blocks.

        The manager, not the trainer, gets the error of a failed copy. A copy that has not begun within
        `deadlines.publish_s` never begins. Raises TransportTimeout for a copy that has begun and is not done: it would
        mix the weights of two steps.
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
        """Wait until `version` is copied and digested. The trainer may change its weights: only the copy is read.

        Raises TransportError if the rank published another version last.
        """
        copy = self._copy
        if copy is None or copy.version != version:
            raise TransportError("the requested version is not the published one", version=version, member=self.name)
        return await asyncio.shield(asyncio.wrap_future(copy.published))

    async def serve(self, version: int) -> int:
        """Send in the stage phase, for backends that are not one-sided; return the bytes written into slots.

        The trainer may already change its weights.
        """
        return await self._run_interruptibly(lambda: self._engine.serve_weights(version))

    async def close(self) -> None:
        self._copy = None
        await self._run(self._engine.finalize)
        self._thread.shutdown(wait=False)


def _digests_of(publication: Publication) -> bytes:
    memory = publication.memory
    return publication.digests.completed(memory.bytes.numpy(), memory.extents, threads=memory_threads()).tobytes()
