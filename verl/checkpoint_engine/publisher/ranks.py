"""The ranks of a `torchrun` as members of a sync that rank 0 manages.

Calls of the manager to the ranks at one time form a round: rank 0 broadcasts them, every rank executes its own, and
rank 0 gathers the results, errors included. The last round broadcasts the outcome of the push. Rounds use their own
gloo process group, so that a push may continue while the ranks train.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from typing import Any, SupportsIndex, cast

import torch
import torch.distributed as dist

from ..config import CheckpointEngineConfig
from ..errors import CheckpointEngineError, ConfigError, PlanError, TransportError, as_ours
from ..plan.delta_choice import DeltaRequest
from ..plan.types import SyncReport
from ..support.loop_thread import LoopThread
from ..sync.members import Holding, TrainerPort, methods_of
from ..sync.trainer_rank import TrainerRank
from .model_source import ModelSource

TELLS_WITHIN_S = 1.0
"""How long rank 0 waits for others to receive a failure; a later rank receives it when it pushes."""


@dataclass(frozen=True)
class Call:
    rank: int
    method: str
    arguments: tuple[Any, ...]
    outcome: asyncio.Future[Any] = field(compare=False)


@dataclass(frozen=True)
class Ended:
    """The outcome of a push, the same on every rank."""

    report: SyncReport | None = None
    error: BaseException | None = None

    def result(self) -> SyncReport:
        """Return the report, or raise `error`."""
        if self.error is not None:
            raise self.error
        assert self.report is not None  # of a push
        return self.report


def rank_and_size() -> tuple[int, int]:
    """Rank and size of the default process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class PublishingRank(TrainerRank):
    """A trainer rank that reads the model's tensors again for every push, and sets `has_begun` as a copy starts."""

    def __init__(self, index: int, source: ModelSource, config: CheckpointEngineConfig) -> None:
        super().__init__(index, source, config)
        self.has_begun = Event()
        source.sends_whole = index == 0
        self._model, self._pushes = source, -1
        self._refused: CheckpointEngineError | None = None

    def look(self, version: SupportsIndex) -> int:
        """Read the model's tensors for a push of `version`; return its number. The training thread calls it.

        It keeps errors; `require_looked` raises them within the push, so that the other ranks get them, too.
        """
        self._pushes, self._refused = -1, None
        try:
            self._pushes = number_of(version)
            self._model.refresh()
        except CheckpointEngineError as exc:
            self._refused = exc
        except Exception as exc:  # noqa: BLE001 - rank 0 tells it to everybody
            self._refused = PlanError(f"the model cannot be read: {type(exc).__name__}: {exc}", member=self.name)
        return self._pushes

    def require_looked(self) -> None:
        if self._refused is not None:
            raise self._refused

    def _describe(self) -> Holding:
        self.require_looked()
        return super()._describe()

    async def publish(
        self, version: int, slots: Mapping[str, str], waits: bool = True, deltas: DeltaRequest | None = None
    ) -> None:
        if version != self._pushes:
            raise ConfigError(
                f"this rank pushes version {self._pushes}, and rank 0 version {version}", member=self.name
            )
        await super().publish(version, slots, waits, deltas)
        self.has_begun.set()


class Ranks:
    """All ranks of the default process group. All ranks construct it together: that is a collective."""

    def __init__(self, member: TrainerRank, *, timeout_s: float, alone: bool = False) -> None:
        """`timeout_s`: for each round. Without a process group, or with `alone`, this rank is the only one."""
        self.rank, self.world_size = (0, 1) if alone else rank_and_size()
        self.member = member
        self._group: Any = None
        if self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            dist.barrier(group=self._group)  # nobody is gone before all are there
        self._loop = LoopThread("weight-publisher-rank")
        self._asked: list[Call] = []
        self._round: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-publisher-round")

    def ports(self) -> list[TrainerPort]:
        """The ports of all ranks, for the manager on rank 0."""
        if self._group is None:
            return [self.member]
        return [cast(TrainerPort, _Port(self, rank)) for rank in range(self.world_size)]

    def serve(self) -> Ended:
        """Execute the rounds of rank 0 until the push has ended. Called on every other rank; blocks.

        Raises TransportError if a rank does not answer any more.
        """
        while True:
            asked: list[Any] = [None]
            self._talk(lambda: dist.broadcast_object_list(asked, src=0, group=self._group))  # noqa: B023
            if isinstance(asked[0], Ended):
                return asked[0]
            self._do(asked[0])

    def end(self, ended: Ended) -> None:
        """Broadcast the outcome after the current round. Called on rank 0.

        A dead rank is noticed at the next push. After TELLS_WITHIN_S, late ranks receive an error when they push.
        """
        if self._group is None:
            return
        told = self._thread.submit(self._talk, lambda: dist.broadcast_object_list([ended], src=0, group=self._group))
        wait([told], None if ended.error is None else TELLS_WITHIN_S)

    async def ask(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call `method` on `rank`, from rank 0's event loop. Calls made before the loop yields share a round."""
        call = Call(rank, method, arguments, asyncio.get_running_loop().create_future())
        self._asked.append(call)
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._rounds())
        return await call.outcome

    async def _rounds(self) -> None:
        while self._asked:
            await asyncio.sleep(0)
            calls, self._asked = self._asked, []
            try:
                outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._lead, calls)
            except Exception as exc:  # noqa: BLE001 - who asked has to know
                outcomes = [as_ours(exc)] * len(calls)
            for call, outcome in zip(calls, outcomes, strict=True):
                if call.outcome.done():  # given up on
                    continue
                if isinstance(outcome, BaseException):
                    call.outcome.set_exception(outcome)
                else:
                    call.outcome.set_result(outcome)

    def _lead(self, calls: list[Call]) -> list[Any]:
        """One round, on rank 0."""
        plain = [(call.rank, call.method, call.arguments) for call in calls]
        self._talk(lambda: dist.broadcast_object_list([plain], src=0, group=self._group))
        by_rank = self._do(plain)
        assert by_rank is not None  # on rank 0
        places = {rank: iter(outcomes) for rank, outcomes in enumerate(by_rank)}
        return [next(places[call.rank]) for call in calls]

    def _do(self, asked: list[tuple[int, str, tuple[Any, ...]]]) -> list[list[Any]] | None:
        """This rank's part of a round; on rank 0 what came out on every rank, in the order of what was asked."""
        work = [getattr(self.member, method)(*arguments) for rank, method, arguments in asked if rank == self.rank]
        own = self._loop.run(_together(work))
        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._talk(lambda: dist.gather_object(own, found, dst=0, group=self._group))
        return found

    def _talk(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except RuntimeError as exc:  # gloo: a peer has closed its connection, or did not come in time
            raise TransportError(
                f"a rank of this job does not answer: it has ended, closed its publisher, or does not push ({exc})"
            ) from exc

    def close(self) -> None:
        """Destroy the process group. Ranks that call this one then get a TransportError."""
        self._thread.shutdown(wait=False)
        self._loop.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class _Port:
    """A `TrainerPort` of another rank, or of this one."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    @property
    def name(self) -> str:
        return f"trainer-{self._rank}"

    async def close(self) -> None:
        """Each rank closes its own, when its publisher is closed: the others need not be there."""
        if self._rank == self._ranks.rank:
            await self._ranks.member.close()


def _asks(method: str) -> Callable[..., Awaitable[Any]]:
    async def ask(self: _Port, *arguments: Any) -> Any:
        return await self._ranks.ask(self._rank, method, arguments)

    return ask


for _method in methods_of(TrainerPort) - {"close"}:
    setattr(_Port, _method, _asks(_method))


def number_of(version: SupportsIndex) -> int:
    """`version` as an int. Raises ConfigError unless it is an integer of 0 to 2**63 - 1."""
    try:
        is_bool = isinstance(version, bool) or getattr(version, "dtype", None) == torch.bool
        number = None if is_bool else operator.index(version)
    except (TypeError, ValueError, RuntimeError):  # torch, of a tensor that is no single number
        number = None
    if number is None or not 0 <= number < 2**63:
        raise ConfigError(f"version={version!r} is no integer of 0 to 2**63 - 1")
    return number


async def _together(work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results, and failures as they can go to another rank."""
    found = await asyncio.gather(*work, return_exceptions=True)
    return [as_ours(one) if isinstance(one, Exception) else one for one in found]
