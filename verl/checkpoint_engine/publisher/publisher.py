"""`WeightPublisher`: pushes the weights of a training loop into servers of vLLM and SGLang, in transactions.

    publisher = WeightPublisher(model, endpoints=["http://127.0.0.1:8000"])
    report = publisher.push(version=step)          # every server serves it, or SyncAborted

It runs a `CheckpointEngineManager` with a rollout node in the process that trains, and others in `verl-sync node` on
other hosts: pause, verification, rollback, deadlines and reports are those of every sync. Under `torchrun` every rank
makes a publisher and pushes; rank 0 runs the manager.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, Self, SupportsIndex, TypeVar

import torch
from torch import nn

from ..config import CheckpointEngineConfig
from ..errors import (
    ActivationError,
    CheckpointEngineError,
    ConfigError,
    SyncAborted,
    TransportError,
    TransportTimeout,
    as_ours,
)
from ..parameter_server.endpoints import ANSWERS
from ..parameter_server.http_server import require_url
from ..parameter_server.rescue import Rescue
from ..parameter_server.writers import LEASE_S, Writer
from ..plan.types import SyncReport
from ..ports import Replica
from ..support import envs
from ..support.loop_thread import LoopThread
from ..sync.manager import CheckpointEngineManager
from .endpoint_replica import EndpointReplica
from .hosts import Hosts
from .model_source import ModelSource
from .ranks import Ended, PublishingRank, Ranks, rank_and_size

T = TypeVar("T")
logger = logging.getLogger(__name__)

ENDS_WITHIN_S = 2.0
"""The time that `close` gives an active push to end, and then as much to close the members."""


class PendingPush:
    """A push that continues while the loop trains."""

    def __init__(self, outcome: Future[SyncReport]) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return self._outcome.done()

    def result(self) -> SyncReport:
        """Wait for the push and return its report. Raises as `WeightPublisher.push`."""
        return self._outcome.result()


class CheckedReplica(Replica, Protocol):
    """A replica that can check beforehand whether the weights fit its model."""

    @property
    def answers(self) -> bool:
        """Whether it did when it was last asked for a step of a push."""
        ...

    async def check(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Mapping[str, str]:
        """Compare with the model. Returns tensor to twin as `EndpointReplica.check`: their values must be equal."""
        ...

    async def claim(self) -> str:
        """Claim its server for this publisher, or renew the claim; returns the server's identity. Raises ConfigError
        that names another owner."""
        ...

    async def release(self) -> None: ...

    async def go_on(self, version: int) -> None:
        """After an aborted push of `version`: if the server is still paused, resume it with the weights that it holds.
        Raises ActivationError if a load has torn its weights, TransportError."""
        ...


class WeightPublisher:
    """Pushes a training loop's weights into servers of vLLM or SGLang. Used from the thread that trains.

    Use as a context manager, or call `close`. The arena of each host with servers, in shared memory, has room for two
    versions of the weights (`config={"slots": 1}`: one). Servers run as the user of the process that owns the arena:
    this one, or `verl-sync node`.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor] | ModelSource,
        endpoints: Sequence[str] | Path,
        *,
        dtype: str | torch.dtype | None = None,
        config: Mapping[str, Any] | None = None,
        report_path: Path | None = None,
        nodes: Sequence[str] = (),
        node_key: Path | None = None,
        alone: bool = False,
        allow_nonfinite: bool = False,
    ) -> None:
        """`model`: a module, one sharded by torch's `fully_shard`, or tensors by the names of the checkpoint; borrowed.

        `endpoints`: URLs of vLLM or SGLang servers, or a file with one in each line, read again at every push. `dtype`:
        the dtype in which floating-point tensors are sent; None: their own. `config`: keys of `checkpoint_engine`, such
        as `{"pause_mode": "keep"}`. `report_path`: a file to which every report is appended as a line of JSON. `nodes`:
        `host:port` of each `verl-sync node`, with the key in the file `node_key`. Servers of another host need one on
        their host; weights travel by `checkpoint_engine.backend=tcp` unless `config` names another.

        Under `torchrun` every rank calls it after `init_process_group`; rank 0 uses its endpoints. With `alone` only
        this rank calls it: it has every tensor whole. NaN and infinite weights are refused without `allow_nonfinite`.

        Raises ConfigError, BackendUnavailable. It reserves no memory and calls no server before the first push.
        """
        across_hosts = {"backend": "tcp"} if nodes else {}
        settings = CheckpointEngineConfig.from_mapping(across_hosts | dict(config or {}))
        self._settings = settings
        self._source = (
            model if isinstance(model, ModelSource) else ModelSource(model, dtype, allow_nonfinite=allow_nonfinite)
        )
        self._member = self._make_member(0 if alone else rank_and_size()[0], settings)
        self._timeout_s = sum(vars(settings.deadlines).values())
        self._ranks = Ranks(self._member, timeout_s=self._timeout_s, alone=alone)
        self._endpoints, self._known = endpoints, dict[str, CheckedReplica]()
        self._checked: dict[str, tuple[str, tuple[int, ...]]] = {}
        """The dtypes and shapes that the known servers have checked."""
        self._writer = Writer.here("publisher")
        self._rescue = Rescue(envs.shm_dir(), ANSWERS, self._writer)
        self._copies: dict[str, Mapping[str, str]] = {}
        """Server name to the result of its `check`."""
        self._servers: dict[str, str] = {}
        """Server name to its identity, which changes when the server is restarted."""
        self._manager: CheckpointEngineManager | None = None
        if self._ranks.rank == 0:
            self._hosts = Hosts(nodes, node_key, settings)
            self._manager = CheckpointEngineManager(
                config=settings,
                trainers=self._ranks.ports(),
                nodes=[self._hosts.node(index) for index in sorted({*map(self._node_of, self._names())})],
                report_path=report_path,
                looks_anew=True,
            )
        self._loop = LoopThread("weight-publisher")
        if self._manager is not None:
            self._loop.start(_renew_claims(weakref.ref(self)))
        self._background = ThreadPoolExecutor(1, thread_name_prefix="weight-publisher-push")
        self._is_pushing = Lock()
        self._pending: Future[SyncReport] | None = None
        self._closed, self._process = False, os.getpid()

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank manages the sync and calls the servers."""
        return self._ranks.rank == 0

    def push(self, version: SupportsIndex, *, allow_older: bool = False) -> SyncReport:
        """Push the current weights to every server, as `version`. Every rank calls it; returns when all serve it.

        `version`: an integer of 0 to 2**63 - 1, also of numpy or torch. One below what this publisher pushed last needs
        `allow_older`.

        Raises SyncAborted: its cause is the first failure. If no server could load the version, those that answer serve
        the previous one. If some could, they serve it; the error names the others, and the next push retries them. For
        NaN or infinite weights the cause is a ConfigError naming the tensor.
        Raises ConfigError for a server that cannot load our weights, ActivationError for weights that do not fit its
        model; the server continues to serve.
        """
        with self._only_push():
            self._await_pending()
            return self._push(self._begin(version), allow_older, released=None)

    def push_async(self, version: SupportsIndex, *, allow_older: bool = False) -> PendingPush:
        """As `push`, but return when the weights are copied and may change again. Every rank calls it.

        It first waits for an earlier push, whose own `result` raises its error.
        """
        with self._only_push():
            self._await_pending()
            number = self._begin(version)
            self._member.has_begun.clear()
            self._pending = pending = self._background.submit(self._push, number, allow_older, _nothing)
            pending.add_done_callback(lambda _: self._member.has_begun.set())
            self._member.has_begun.wait()
            self._member.await_copied()
            return PendingPush(pending)

    def close(self) -> None:
        """Release the arena; servers keep their weights. Every rank calls it. Idempotent.

        It cancels an active push after `ENDS_WITHIN_S`, and waits neither for a server or host that does not answer
        nor for other ranks, whose next push fails: it returns within 5 s.
        """
        if self._closed or os.getpid() != self._process:  # a fork has none of its threads
            return
        self._closed = True
        self._give_up_pending()
        closing = self._loop.start(self._member.close() if self._manager is None else self._let_go(self._manager))
        self._ends_within(ENDS_WITHIN_S, closing)
        self._loop.cancel(closing)
        if self._manager is not None:
            self._hosts.close()
            self._rescue.close()
        self._ranks.close()
        self._background.shutdown(wait=False)
        self._loop.close()

    def _give_up_pending(self) -> None:
        """What goes on is asked to end, twice: at first servers that are paused load what they were told to. On other
        ranks the first rank ends it."""
        for _ in range(2):
            if self._pending is not None and not self._ends_within(ENDS_WITHIN_S / 2, self._pending):
                self._loop.cancel_all()

    def _ends_within(self, timeout_s: float, work: Future[Any]) -> bool:
        """All that a rank waits for when it closes, but for what it has cancelled."""
        return bool(wait([work], timeout_s).done)

    def _begin(self, version: SupportsIndex) -> int:
        """The number of the push that begins. Raises ConfigError if this is closed; what else is wrong is found out by
        the push itself, which other ranks are in."""
        if self._closed:
            raise ConfigError("the publisher is closed: make a new one to push again")
        return self._member.look(version)

    def _push(self, version: int, allow_older: bool, released: Callable[[], None] | None) -> SyncReport:
        try:
            return self._pushed(version, allow_older, released)
        finally:
            self._source.release()

    def _pushed(self, version: int, allow_older: bool, released: Callable[[], None] | None) -> SyncReport:
        if self._manager is None:
            return self._ranks.serve().result()
        try:
            ended = Ended(self._loop.run(self._transact(self._manager, version, allow_older, released)))
        except CheckpointEngineError as exc:
            ended = Ended(error=exc)
        except BaseException as exc:
            self._ranks.end(Ended(error=SyncAborted(as_ours(exc).message, version=version, member="rank 0")))
            raise
        self._ranks.end(ended)
        return ended.result()

    async def _transact(
        self,
        manager: CheckpointEngineManager,
        version: int,
        allow_older: bool,
        released: Callable[[], None] | None,
    ) -> SyncReport:
        self._member.require_looked()
        if not allow_older and manager.version is not None and version < manager.version:
            raise ConfigError(
                f"version {version} is older than {manager.version}, which was pushed before it: number it higher, or "
                "pass allow_older=True"
            )
        names = self._names()
        await self._take_in(manager, names)
        try:
            report = await manager.update_weights(version, released=released)
        except SyncAborted:
            await self._go_on(version, self._known.values())
            raise
        failed = [name for name in names if name not in report.replicas_updated]
        if failed:
            await self._go_on(version, [one for name, one in self._known.items() if name in failed and one.answers])
            raise SyncAborted(
                f"{', '.join(failed)} could not load it; {', '.join(report.replicas_updated)} serve it",
                version=version,
                phase="activate",
            )
        return report

    async def _go_on(self, version: int, replicas: Iterable[CheckedReplica]) -> None:
        outcomes = await asyncio.gather(*(replica.go_on(version) for replica in replicas), return_exceptions=True)
        for why in outcomes:
            if isinstance(why, Exception):
                logger.warning("a server stays paused: %s", why)

    async def _take_in(self, manager: CheckpointEngineManager, names: Sequence[str]) -> None:
        """Servers that are new or were left out get the version in service; those that are named no more are left."""
        needed = {*map(self._node_of, names)}
        gone = [self._known.pop(name) for name in [*self._known] if name not in names]
        await manager.remove_replicas(gone)
        await _release(gone)
        for index in needed - self._hosts.nodes.keys():
            await self._join(manager, index)
        tensors = {spec.name: (spec.dtype, spec.shape) for spec in self._source.specs()}
        for name in names:
            await self._admit(name, tensors)
        self._checked = tensors
        serving = {replica.name for replica in manager.replicas}
        try:
            await manager.add_replicas([replica for name, replica in self._known.items() if name not in serving])
        except ActivationError as exc:
            logger.warning("not loaded before the next version: %s", exc)
            if not isinstance(exc.__cause__, TransportError):  # those that answer get that with the others
                await manager.add_replicas([*manager.quarantined], catch_up=False)
        if idle := self._hosts.nodes.keys() - needed:
            await self._leave(manager, idle)

    async def _admit(self, name: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        """A server that does not take these weights, or is another's, is found out here, before any is paused."""
        replica, is_known = self._known.get(name) or self._replica(name), name in self._known
        if not is_known or tensors != self._checked:
            self._copies[name] = await self._answered(name, replica.check(tensors))
        try:
            server = await self._answered(name, replica.claim())
            if is_known and server != self._servers.get(name):  # it was started anew, perhaps with another model
                self._copies[name] = await self._answered(name, replica.check(tensors))
            self._require_equal(self._copies[name], name)
            for other in self._known.keys() - {name}:
                if self._servers.get(other) == server:
                    raise ConfigError(f"{other} and {name} are the same server: name it once")
        except TransportError as exc:
            if not is_known:
                raise
            logger.warning("%s does not answer: %s", name, exc.message)  # the push itself leaves it out
        except CheckpointEngineError:
            if not is_known:
                await _release([replica])
            raise
        else:
            self._known[name], self._servers[name] = replica, server

    async def _answered(self, name: str, question: Awaitable[T]) -> T:
        """Raises TransportTimeout if the server does not answer within `prepare_s`, and what the question does."""
        limit_s = self._settings.deadlines.prepare_s
        try:
            async with asyncio.timeout(limit_s) as timer:
                return await question
        except TimeoutError as exc:
            if not timer.expired():
                raise
            raise TransportTimeout(f"no answer within {limit_s:g} s", member=name) from exc

    def _require_equal(self, copies: Mapping[str, str], server: str) -> None:
        """As far as this rank holds them; of the others, the server finds out when it loads. Raises ConfigError."""
        for name, twin in copies.items():
            if not self._source.may_be_equal(name, twin):
                raise ConfigError(
                    f"{server} computes with {twin} in the place of {name}, and they differ: its config has "
                    "tie_word_embeddings=true, and this model has a head of its own. Serve a model whose config has "
                    "tie_word_embeddings=false"
                )

    async def _let_go(self, manager: CheckpointEngineManager) -> None:
        await asyncio.gather(_release(self._known.values()), manager.close())

    async def _join(self, manager: CheckpointEngineManager, index: int) -> None:
        """Raises what keeps that host's node from getting the version in service; the push has not begun then."""
        node = self._hosts.node(index)
        try:
            await manager.add_nodes([node])
        except BaseException:
            await self._hosts.nodes.pop(index).close()
            raise

    async def _leave(self, manager: CheckpointEngineManager, indices: set[int]) -> None:
        """Hosts without servers need no memory."""
        idle = [self._hosts.nodes.pop(index) for index in indices]
        await manager.remove_nodes(idle)
        for node in idle:
            await node.close()

    def _make_member(self, rank: int, settings: CheckpointEngineConfig) -> PublishingRank:
        return PublishingRank(rank, self._source, settings)

    def _names(self) -> list[str]:
        """Of the servers that get the next version."""
        return urls_of(self._endpoints)

    def _node_of(self, name: str) -> int:
        """Index of the rollout node from which that server loads. Raises ConfigError if its host has none."""
        return self._hosts.index_of(name)

    def _replica(self, name: str) -> CheckedReplica:
        index = self._node_of(name)
        return EndpointReplica(
            name,
            index,
            self._settings,
            timeout_s=self._timeout_s,
            reports=self._hosts.reports(index),
            writer=self._writer,
            rescue=self._rescue,
        )

    @contextmanager
    def _only_push(self) -> Iterator[None]:
        """Raises ConfigError in a fork, and as long as another thread, or this one below a signal handler, pushes."""
        if os.getpid() != self._process:
            raise ConfigError(
                f"the publisher was made by process {self._process}, of which this one, {os.getpid()}, is a fork: make "
                "one here"
            )
        if not self._is_pushing.acquire(blocking=False):
            raise ConfigError("a push is active in another thread: push from one thread, or use push_async")
        try:
            yield
        finally:
            self._is_pushing.release()

    def _await_pending(self) -> None:
        if self._pending is not None:
            wait([self._pending])
            self._pending = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _renew_claims(of: weakref.ref[WeightPublisher]) -> None:
    """As long as it is open, and anybody has it: between pushes a server is its publisher's, too."""
    while of() is not None:
        for replica in _known_to(of()):
            with suppress(CheckpointEngineError):  # the next push says it
                await replica.claim()
        await asyncio.sleep(LEASE_S / 3)


def _known_to(publisher: WeightPublisher | None) -> list[CheckedReplica]:
    return [*publisher._known.values()] if publisher is not None else []


async def _release(replicas: Iterable[CheckedReplica]) -> None:
    """Those that do not answer find out by themselves."""
    outcomes = await asyncio.gather(*(replica.release() for replica in replicas), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            logger.info("a server is not released: %s", outcome)


def urls_of(endpoints: Sequence[str] | Path) -> list[str]:
    """The URLs of `endpoints`, each once, without a trailing slash. Raises ConfigError for none or an invalid one."""
    if isinstance(endpoints, (str, bytes)) or not isinstance(endpoints, (Path, Iterable)):
        raise ConfigError(f"endpoints is a list of URLs, or a Path to a file of them: [{endpoints!r}]?")
    if isinstance(endpoints, Path):
        try:
            found = [line.strip() for line in endpoints.read_text("utf-8").splitlines()]
        except OSError as exc:
            raise ConfigError(f"the file of endpoints {endpoints} cannot be read: {exc.strerror}") from exc
    else:
        found = list(endpoints)
    if others := [one for one in found if not isinstance(one, str)]:
        raise ConfigError(f"an endpoint is a URL like http://127.0.0.1:8000, not {others[0]!r}")
    urls = list(dict.fromkeys(url.rstrip("/") for url in found if url and not url.startswith("#")))
    for url in urls:
        require_url(url)
    if not urls:
        raise ConfigError(f"no endpoint is named{f' in {endpoints}' if isinstance(endpoints, Path) else ''}")
    return urls


def _nothing() -> None: ...
