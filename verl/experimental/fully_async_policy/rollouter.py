"""Draws prompts and has the rollout engines generate, within the budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from verl.experimental.fully_async_policy.budget import StalenessBudget
from verl.experimental.fully_async_policy.message_queue import Places, Sample, where
from verl.experimental.fully_async_policy.state import Anchor, Prompt, RollouterState, Since, uid_of
from verl.protocol import DataProto
from verl.trainer.ppo.generation import joined
from verl.utils.dataset import build_dataloader
from verl.utils.lifetime import begin_actor
from verl.utils.timing import marked_timer
from verl.workers.config import PPOConfig


class Rollouter:
    """A Ray actor. The driver is its only caller; `queue` is a `MessageQueue`."""

    def __init__(
        self,
        *,
        config: PPOConfig,
        dataset: Dataset[dict[str, Any]],
        queue: Any,
        total_prompts: int,
        limit: int,
        max_in_flight: int,
        run: str,
        kept_in: Path | None = None,
        number: int = 0,
        source: str = "",
        asks_greedily: bool = False,
    ) -> None:
        """`total_prompts` is the whole run's; for `limit` see `StalenessBudget`, for `source` `PromptLoader`.

        For `run` see `uid_of`; agent loops keep what is under way in the directory `kept_in`. `number` identifies this
        rollouter to the queue. With `asks_greedily`, samples have a `greedy` response, too.
        """
        self._replaces = config.algorithm.filter_groups.enable
        """Whether the trainer may ask for others in the place of some."""
        self._asks_greedily = asks_greedily
        self._uid_run, self._number = run, number
        self._unfinished = (str(kept_in), run) if kept_in is not None else None
        begin_actor()
        self._config = config
        self._dataloader = build_dataloader(
            dataset, config.data, batch_size=1, shuffle=config.data.shuffle, source=source
        )
        self._rows = self._epochs()
        self._workers: Sequence[Any] = ()
        self._asked: dict[tuple[int, bool], asyncio.Future[DataProto]] = {}
        """What they have been asked for, by prompt, and whether greedily; it goes on when another prompt fails."""
        self._queue = queue
        self._total_prompts = total_prompts
        self._max_in_flight = max_in_flight
        self._budget = StalenessBudget(limit)
        self._in_flight: dict[int, Prompt] = {}
        """Drawn, and not in the queue yet."""
        self._handed_over: dict[int, Prompt] = {}
        """What has gone to the queue, of which it is not known that the trainer has it."""
        self._given: dict[int, Sample] = {}
        """What the queue was given at the beginning, likewise; whose prompts alone are not known."""
        self._drawn = 0
        self._replaced = 0
        self._draining = False
        self._waiting: set[int] = set()
        """Those of `_in_flight` that the budget has no room for yet, because more is queued than it allows."""
        self._held = False
        """Draining since before there was this rollouter: also what is in flight is not begun."""
        self._runs = 0
        """How often `run` has begun."""
        self._running = False
        self._handing_over = asyncio.Lock()
        """Held while a sample goes from `_in_flight` to the queue: it is in one of them at any other time."""
        self._changed = asyncio.Condition()
        self._began_s = time.monotonic()
        self._idle_s = 0.0
        self._idle_since_s: float | None = None
        """When nothing was in flight any more, and nothing might be started."""

    async def where(self) -> str:
        """The process, as text. Answers at once, so that silence means a stopped process."""
        return where()

    async def restore(self, anchor: Anchor, since: Since) -> None:
        """Continue from another rollouter's state. Called before `run`; the queue has `anchor.state.queued`."""
        state = anchor.state
        self._dataloader.load_state_dict(state.dataloader)
        self._rows = self._epochs()
        self._drawn, self._replaced = state.drawn, since.replaced
        again = [self._draw() for _ in range(state.drawn, max(since.there, default=-1) + 1)]
        prompts = {prompt.index: prompt for prompt in (*state.in_flight, *again)}
        self._in_flight = {index: prompt for index, prompt in prompts.items() if index not in since.there}
        self._handed_over = {index: prompt for index, prompt in prompts.items() if index in since.there}
        self._given = {sample.index: sample for sample in state.queued}
        counted = {*anchor.counted, *self._in_flight, *(prompt.index for prompt in again)}
        counted -= since.given_back
        beyond = max(len(counted) - self._budget.limit, 0)
        self._waiting = set(sorted(self._in_flight)[-beyond:] if beyond else ())
        self._budget.synced(counted - self._waiting)
        self._draining = self._held = since.is_draining

    async def state(self, step: int | None = None) -> RollouterState:
        """A consistent copy of the state during generation. The trainer must not take from the queue meanwhile.

        With `step`, it goes into the checkpoint of that step.
        """
        async with self._handing_over:
            queued = await self._queue.content.remote(step)
            return RollouterState(
                self._dataloader.state_dict(),
                self._drawn,
                tuple(self._in_flight.values()),
                tuple(queued),
                self._replaced,
            )

    async def set_max_in_flight(self, limit: int) -> None:
        """Generate at most `limit` prompts at once from now on, after a change of engines."""
        self._max_in_flight = limit
        async with self._changed:
            self._changed.notify_all()

    async def run(self, workers: Sequence[Any]) -> None:
        """Have `workers`, the agent loops' actors, generate every prompt of the run, and queue the samples.

        If the trainer may have prompts replaced, the last one is unknown: runs until the actor ends. Raises the first
        failure of a sample; a further call goes on with the prompts in flight then.
        """
        self._workers = workers
        self._runs += 1
        self._running = True
        async with self._handing_over:
            unfinished = list(self._in_flight.values())
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: not self._held)
        try:
            async with asyncio.TaskGroup() as samples:
                for prompt in sorted(unfinished, key=lambda prompt: (prompt.index in self._waiting, prompt.index)):
                    if prompt.index in self._waiting:
                        await self._may_start(is_drawn=True)
                        self._waiting.discard(prompt.index)
                        self._budget.start(prompt.index)
                    samples.create_task(self._generate(prompt))
                while self._replaces or not self._all_drawn:
                    await self._may_start()
                    prompt = self._draw()
                    self._budget.start(prompt.index)
                    self._in_flight[prompt.index] = prompt
                    samples.create_task(self._generate(prompt))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._running = False
            async with self._changed:
                self._changed.notify_all()

    async def replace(self, prompts: Sequence[int]) -> None:
        """Generate as many more prompts as these, which the trainer took but will not train on."""
        self._replaced += len(prompts)
        self._budget.give_back(prompts)
        async with self._changed:
            self._changed.notify_all()

    async def drain(self, runs: int) -> None:
        """Start no prompt until `synced`; return when none is in flight any more, or the `runs`-th `run` has failed,
        which may arrive after this call."""
        self._draining = True
        async with self._changed:
            await self._changed.wait_for(lambda: self._runs >= runs and not (self._begun and self._running))

    async def synced(self) -> tuple[dict[str, float], Anchor]:
        """Note that the engines have a new version; returns metrics since the last call, and the new anchor."""
        async with self._handing_over:
            queue: dict[str, float] = await self._queue.metrics.remote()
            places: Places = await self._queue.places.remote()
            # From here on nothing is awaited: what is started meanwhile would be counted neither before nor after.
            outstanding = {*self._in_flight, *places.queued} - self._waiting
            self._budget.synced(outstanding)
            anchor = self._anchor(places, outstanding)
        now = time.monotonic()
        if self._idle_since_s is not None:
            self._idle_s += now - self._idle_since_s
            self._idle_since_s = now
        elapsed_s = max(now - self._began_s, 1e-9)
        metrics = {
            "fully_async/rollouter/idle_ratio": self._idle_s / elapsed_s,
            "fully_async/rollouter/active_time": elapsed_s - self._idle_s,
            "fully_async/rollouter/version_time": elapsed_s,
            "fully_async/count/total_generated_samples": float(self._drawn - len(self._in_flight)),
            "fully_async/count/staleness_samples": float(len(outstanding)),
        }
        self._began_s, self._idle_s = now, 0.0
        self._draining = self._held = False
        async with self._changed:
            self._changed.notify_all()
        return queue | metrics, anchor

    def _anchor(self, places: Places, counted: set[int]) -> Anchor:
        perhaps = {*places.queued, *places.handed_out}
        self._forget([prompt for index, prompt in self._handed_over.items() if index not in perhaps])
        self._handed_over = {index: prompt for index, prompt in self._handed_over.items() if index in perhaps}
        self._given = {index: sample for index, sample in self._given.items() if index in perhaps}
        prompts = (*self._in_flight.values(), *self._handed_over.values())
        state = RollouterState(
            self._dataloader.state_dict(), self._drawn, prompts, tuple(self._given.values()), self._replaced
        )
        return Anchor(state, frozenset(counted))

    def _forget(self, prompts: Sequence[Prompt]) -> None:
        """The trainer has them: no rollouter in the place of this one will ask for them again."""
        by_worker: dict[int, list[str]] = {}
        for prompt in prompts if self._workers else ():
            uid = prompt.rows.non_tensor_batch["uid"][0]
            by_worker.setdefault(prompt.index % len(self._workers), []).append(uid)
        for number, uids in by_worker.items():
            self._workers[number].forget.remote(uids)

    @property
    def _all_drawn(self) -> bool:
        return self._drawn >= self._total_prompts + self._replaced

    @property
    def _begun(self) -> int:
        return len(self._in_flight) - len(self._waiting)

    async def _may_start(self, *, is_drawn: bool = False) -> None:
        def allowed() -> bool:
            waits = self._draining or self._budget.is_spent or self._begun >= self._max_in_flight
            return not (waits or (self._all_drawn and not is_drawn))

        async with self._changed:
            while not allowed():
                if not self._begun and self._idle_since_s is None:
                    self._idle_since_s = time.monotonic()
                await self._changed.wait()
        if self._idle_since_s is not None:
            self._idle_s += time.monotonic() - self._idle_since_s
            self._idle_since_s = None

    async def _generate(self, prompt: Prompt) -> None:
        seconds: dict[str, float] = {}
        asked = [self._ask(prompt.index, prompt.rows)]
        if self._asks_greedily:  # at the same time, and so by the same weights
            asked.append(self._ask(prompt.index, prompt.rows[:1], greedy=True))
        with marked_timer("sample", seconds):
            answers = await asyncio.gather(*asked)
        sample = Sample(prompt.index, answers[0], seconds["sample"], *answers[1:])
        await asyncio.shield(self._hand_over(sample))  # not given up half way, when another sample fails

    async def _ask(self, index: int, rows: DataProto, **how: bool) -> DataProto:
        keep = self._config.actor_rollout_ref.rollout.keep_tokens != "off"
        meta = {"validate": False, "keep": keep, "unfinished": self._unfinished, **how}
        samples = DataProto(None, rows.non_tensor_batch, meta)
        first, key = index * self._config.actor_rollout_ref.rollout.n, (index, bool(how))
        answer = self._asked.get(key)
        if answer is not None:
            await asyncio.wait([answer])
        if answer is None or answer.cancelled() or answer.exception() is not None:
            worker = self._workers[index % len(self._workers)]  # each time the same: it has what an attempt left
            answer = self._asked[key] = asyncio.ensure_future(worker.generate_sequences.remote(samples, first))
            answer.add_done_callback(_look_at)
            await asyncio.wait([answer])
        return joined(rows, answer.result())  # not into `rows` themselves, which may have to be generated again

    async def _hand_over(self, sample: Sample) -> None:
        async with self._handing_over:
            await self._queue.put.remote(sample, self._number)
            self._handed_over[sample.index] = self._in_flight.pop(sample.index)
            for greedily in (False, True):
                self._asked.pop((sample.index, greedily), None)
        async with self._changed:
            self._changed.notify_all()

    def _draw(self) -> Prompt:
        rows = DataProto.from_dict(non_tensors=next(self._rows))
        rows.non_tensor_batch["uid"] = np.array([uid_of(self._uid_run, self._drawn)], dtype=object)
        self._drawn += 1
        return Prompt(self._drawn - 1, rows.repeat(self._config.actor_rollout_ref.rollout.n, interleave=True))

    def _epochs(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._dataloader


def _look_at(answer: asyncio.Future[DataProto]) -> None:
    """asyncio would log a failure that nobody has looked at: the run had failed of another one already."""
    if not answer.cancelled():
        answer.exception()
