"""The trainer's view of rollouter and queue: starts them, and restarts them when one dies.

Only the trainer knows which samples it has, only the queue which are finished, only the rollouter which are being
generated. The `Anchor` of the last sync outlives a rollouter: its replacement starts there, and omits what queue and
trainer have. Agent loops have what it asks for again: responses in flight, and samples that are not known to be with
the trainer; so they do if a queue dies (decision 29).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch.utils.data import Dataset

from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.experimental.fully_async_policy.message_queue import MessageQueue, Places, Sample, options_of_actor
from verl.experimental.fully_async_policy.rollouter import Rollouter
from verl.experimental.fully_async_policy.state import Anchor, RollouterState, Since
from verl.single_controller.future import is_of_dead_actor
from verl.trainer.fleet.recovery import RestartLimit
from verl.trainer.kept_samples import KeptSamples
from verl.trainer.ppo.generation import HealingRollouts
from verl.utils.failures import NamedFailure
from verl.workers.config import PPOConfig

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""The interval at which a trainer that waits for samples checks for a failed sync."""
ANSWERS_WITHIN_S = 10.0
"""Both actors answer at once, even while they work; one that does not answer within this time is killed."""
STARTS_WITHIN_S = 120.0


class SupplyLost(NamedFailure):
    """Rollouter or queue died more often than the limit of restarts allows."""


@dataclass(frozen=True)
class Terms:
    """The arguments of all rollouters and queues of one run."""

    config: PPOConfig
    dataset: Dataset[dict[str, Any]]
    source: str
    asks_greedily: bool
    total_prompts: int
    limit: int
    run: str
    """Of which uids are made: see `uid_of`."""
    kept: KeptSamples | None = None


@dataclass(eq=False)
class _Part:
    name: str
    actor: Any
    where: str = ""
    watch: Future[None] | None = None
    was_silent: bool = False
    runs: int = 0
    """How often a rollouter was asked to run."""

    def __str__(self) -> str:
        return f"{self.name} ({self.where}) {'does not answer' if self.was_silent else 'died'}"


class Supply:
    """Runs rollouter and queue until `close`. The driver's main thread uses it; `synced` runs on `loop`."""

    def __init__(
        self,
        terms: Terms,
        *,
        resumed: RollouterState,
        rollouts: HealingRollouts,
        follow_replicas: Callable[[], None],
        max_in_flight: Callable[[], int],
        loop: LoopThread,
        limit: RestartLimit,
        file: int = 0,
    ) -> None:
        """Starts both, and generation from the state `resumed`. Calls `follow_replicas` after restarts of replicas.

        `file` is the number of the file where the samples are kept until the next checkpoint.
        """
        self._terms, self._rollouts, self._loop, self._limit = terms, rollouts, loop, limit
        self._follow_replicas, self._max_in_flight = follow_replicas, max_in_flight
        self.restarts = 0
        """How often the rollouter was started again."""
        self._file = file
        self._uids = terms.run
        self.step = 0
        """Of which samples are taken; for what is told."""
        self._number = 0
        """Of the rollouter there is."""
        self._lock = threading.Lock()
        """Of the three that follow: a sync ends on another thread than the one that replaces a rollouter."""
        self._anchor = Anchor.of(resumed)
        self._draining = False
        self._rollouter: _Part | None = None
        self._queue: _Part | None = None
        self._taken: set[int] = set()
        """Of what the anchor may bring again."""
        self._given_back: set[int] = set()
        self._replaced = resumed.replaced
        self._running: list[Any] = []
        """What `run` of the rollouter comes to; empty once it had no more to do."""
        self._changes = 0
        """Of the rollouts, when that began."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self._run()

    def close(self) -> None:
        """Idempotent."""
        for part in (self._rollouter, self._queue):
            self._end(part)
        self._rollouter = self._queue = None

    def take(self, count: int, meanwhile: Callable[[], None]) -> list[Sample]:
        """The next samples, in the order of their prompts. Calls `meanwhile` every LOOK_S.

        Raises the rollouter's errors, and SupplyLost.
        """
        restarts, queue, taking = 0, None, None
        while True:
            if queue is not self._queue:  # at first; or here or in `meanwhile` another one took its place
                queue = self._present(self._queue)
                taking = queue.actor.take.remote(count)
            ready = ray.wait([taking, *self._running], num_returns=1, timeout=LOOK_S)[0]
            if taking in ready:
                try:
                    samples: list[Sample] = ray.get(taking)
                except RayError as exc:
                    self._restart_lost(exc)
                else:
                    break
            elif ready:
                restarts += self._heal_unless_done(restarts)
            meanwhile()
        self._taken.update(sample.index for sample in samples)
        return sorted(samples, key=lambda sample: sample.index)

    def ask_progress(self) -> list[Any]:
        """Request the progress of the samples that `take` waits for. Called by another thread meanwhile."""
        return [self._present(self._queue).actor.progress.remote()]

    def replace(self, prompts: Sequence[int]) -> None:
        """Have as many more prompts generated as these, which the trainer took but will not train on."""
        self._given_back.update(prompts)
        self._replaced += len(prompts)
        try:
            ray.get(self._present(self._rollouter).actor.replace.remote(prompts))
        except RayError as exc:
            self._restart_lost(exc)  # the next one has been told

    def drain(self) -> Future[Any]:
        """Have no prompt started until `synced`. The result is done, or fails, when none is in flight any more."""
        with self._lock:
            self._draining = True
            rollouter = self._present(self._rollouter)
            draining: Future[Any] = rollouter.actor.drain.remote(rollouter.runs).future()
        return draining

    async def synced(self) -> dict[str, float] | None:
        """Tell the rollouter of a new version; returns its metrics, or None if it is dead: see `tell_synced`."""
        rollouter = self._rollouter
        if rollouter is None:  # another one takes its place right now
            return None
        try:
            metrics, anchor = await rollouter.actor.synced.remote()
        except RayError:
            return None
        return metrics if self._is_anchored(rollouter, anchor) else None

    def tell_synced(self) -> dict[str, float]:
        """As `synced`, on the main thread; restarts what died."""
        metrics, anchor = self._asked("synced")
        assert self._is_anchored(self._rollouter, anchor)  # this thread alone replaces rollouters
        told: dict[str, float] = metrics
        return told

    def state(self) -> RollouterState:
        """The state after the samples taken so far, for the checkpoint of `step`."""
        state: RollouterState = self._asked("state", self.step)
        self._file = max(self._file, self.step)
        return state

    def set_max_in_flight(self) -> None:
        """Adapt the prompts generated at once to the number of engines."""
        self._present(self._rollouter).actor.set_max_in_flight.remote(self._max_in_flight())

    def _is_anchored(self, rollouter: _Part | None, anchor: Anchor) -> bool:
        """Take `anchor` of that rollouter, unless another one has taken its place, which begins at the one before."""
        with self._lock:
            if rollouter is not self._rollouter:
                return False
            self._anchor, self._draining = anchor, False
            return True

    def _asked(self, method: str, *arguments: Any) -> Any:
        while True:
            try:
                return ray.get(getattr(self._present(self._rollouter).actor, method).remote(*arguments))
            except RayError as exc:
                self._restart_lost(exc)

    def _heal_unless_done(self, restarts: int) -> bool:
        """After `run` has ended: whether agent loops were healed, for the `restarts`-th time before this one.

        Something may kill whoever generates the samples of a step. Raises why `run` failed if nothing had died.
        """
        try:
            ray.get(self._running)
        except RayError as exc:
            if self._lost():
                self._restart_lost(exc)
                return False
            if not self._rollouts.recovers(since=self._changes, tried=restarts):
                raise
            self._follow_replicas()
            logger.warning("generating what was in flight again")
            self._run()
            return True
        self._running = []
        return False

    def _run(self) -> None:
        self._changes = self._rollouts.changes
        rollouter = self._present(self._rollouter)
        rollouter.runs += 1
        self._running = [rollouter.actor.run.remote(self._rollouts.workers)]

    def _lost(self) -> list[_Part]:
        """Those of the two that died or do not answer."""
        parts = [part for part in (self._rollouter, self._queue) if part is not None]
        asked = {part.actor.where.remote(): part for part in parts}
        answers, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWERS_WITHIN_S)
        for answer in silent:
            asked[answer].was_silent = True
        return [part for answer, part in asked.items() if answer in silent or is_of_dead_actor(answer)]

    def _restart_lost(self, failure: Exception) -> None:
        """Start again what died, and go on generating. Raises `failure` if nothing had, SupplyLost if it may not be."""
        began_s = time.monotonic()
        lost = self._lost()
        if not lost:
            raise failure
        what = " and ".join(map(str, lost))
        while self._limit.take():
            try:
                waiting = self._start(keep_queue=self._queue not in lost)
            except (RayActorError, GetTimeoutError) as exc:
                logger.warning("%s; started again, it died again: %s", what, str(exc).splitlines()[0])
                lost = self._lost()
                continue
            self.restarts += 1
            self._run()
            logger.warning(
                "%s; trainer, engines and agent loops are kept, and %d samples in the queue; the run goes on with step "
                "%d, after %.1f s",
                what,
                waiting,
                self.step,
                time.monotonic() - began_s,
            )
            return
        told = f"{what}; {self._limit} allows no other start"
        logger.error("%s", told)
        raise SupplyLost(told) from None

    def _start(self, keep_queue: bool = False) -> int:
        """A rollouter in the place of the one there is, and a queue unless that is kept, from the anchor on.

        How many samples are in the queue.
        """
        terms = self._terms
        with self._lock:
            before, self._rollouter = self._rollouter, None
            anchor, is_draining = self._anchor, self._draining
        self._end(before)
        self._number += 1
        self._forget_before(anchor)
        waiting = [sample for sample in anchor.state.queued if sample.index not in self._taken]
        if not keep_queue:
            self._end(self._queue)
            room = terms.limit + len(waiting)
            self._queue = _Part("queue", _remote(MessageQueue, room, terms.kept, self._file))
        queue = self._present(self._queue)
        actor = _remote(
            Rollouter,
            config=terms.config,
            dataset=terms.dataset,
            queue=queue.actor,
            total_prompts=terms.total_prompts,
            limit=terms.limit,
            max_in_flight=self._max_in_flight(),
            run=self._uids,
            kept_in=terms.kept.directory if terms.kept is not None else None,
            number=self._number,
            source=terms.source,
            asks_greedily=terms.asks_greedily,
        )
        rollouter = _Part("rollouter", actor)
        try:
            if not keep_queue:
                _got(queue.actor.restore.remote(waiting))
            places: Places = _got(queue.actor.accept.remote(self._number))
            there = frozenset((*self._taken, *places.queued, *places.handed_out))
            since = Since(there, frozenset(self._given_back), self._replaced, is_draining)
            _got(actor.restore.remote(anchor, since))  # alone: Ray does not keep the order of an async actor's calls
        except BaseException:
            self._end(rollouter)
            raise
        with self._lock:
            self._rollouter = rollouter
        for part in (rollouter, queue):
            if part.watch is None:
                part.where = _got(part.actor.where.remote())
                part.watch = self._loop.start(_kill_when_silent(part))
        return len(places.queued)

    def _forget_before(self, anchor: Anchor) -> None:
        """Of what was taken and given back, what `anchor` cannot bring again."""
        undone, drawn = anchor.undone | anchor.counted, anchor.state.drawn
        self._taken = {index for index in self._taken if index >= drawn or index in undone}
        self._given_back = {index for index in self._given_back if index >= drawn or index in undone}

    def _end(self, part: _Part | None) -> None:
        if part is None:
            return
        if part.watch is not None:
            self._loop.cancel(part.watch)
        ray.kill(part.actor, no_restart=True)

    @staticmethod
    def _present(part: _Part | None) -> _Part:
        assert part is not None  # closed
        return part


def _remote(cls: type, *arguments: Any, **named: Any) -> Any:
    return ray.remote(cls).options(**options_of_actor()).remote(*arguments, **named)


def _got(answer: Any) -> Any:
    """Of an actor that may be starting."""
    return ray.get(answer, timeout=STARTS_WITHIN_S)


async def _kill_when_silent(part: _Part) -> None:
    """Until it is dead. Calls of a process that is stopped would be waited for, for ever; those of a dead one fail."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await part.actor.where.remote()
        except TimeoutError:
            part.was_silent = True
            ray.kill(part.actor, no_restart=True)
            return
        except RayActorError:
            return
