"""Draws prompts and keeps the rollout engines busy with them, as far as the budget allows."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from verl.experimental.fully_async_policy.budget import StalenessBudget
from verl.experimental.fully_async_policy.message_queue import Sample
from verl.protocol import DataProto
from verl.trainer.plain_state import from_plain, to_plain
from verl.utils.config import ConfigError
from verl.utils.dataset import build_dataloader
from verl.utils.lifetime import begin_actor
from verl.utils.timing import marked_timer
from verl.workers.config import PPOConfig


@dataclass(frozen=True)
class Prompt:
    """One prompt, `rollout.n` times under one uid."""

    index: int
    rows: DataProto


@dataclass(frozen=True)
class RollouterState:
    """Everything that a later rollouter needs to generate what this one would have."""

    dataloader: dict[str, Any]
    drawn: int
    in_flight: tuple[Prompt, ...]
    queued: tuple[Sample, ...]
    replaced: int = 0
    """Of the prompts that were drawn, those that others were drawn for."""

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint, all but the position in the data."""
        return {
            "drawn": self.drawn,
            "in_flight": [to_plain((prompt.index, prompt.rows)) for prompt in self.in_flight],
            "queued": [to_plain((sample.index, sample.batch, sample.seconds, sample.greedy)) for sample in self.queued],
            "replaced": self.replaced,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], dataloader: dict[str, Any]) -> RollouterState:
        """Raises ConfigError for what `to_plain` does not make."""
        try:
            return cls(
                dataloader,
                int(plain["drawn"]),
                tuple(Prompt(*from_plain(prompt)) for prompt in plain["in_flight"]),
                tuple(Sample(*from_plain(sample)) for sample in plain["queued"]),
                int(plain.get("replaced", 0)),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"the checkpoint holds no state of a rollouter: {exc!r}") from exc


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
        source: str = "",
        asks_greedily: bool = False,
    ) -> None:
        """`total_prompts` of the whole run; `limit`: see `StalenessBudget`; `source`: see `PromptLoader`.

        `asks_greedily`: samples have a `greedy` response, too.
        """
        self._replaces = config.algorithm.filter_groups.enable
        """Whether the trainer may ask for others in the place of some."""
        self._asks_greedily = asks_greedily
        begin_actor()
        self._config = config
        self._dataloader = build_dataloader(
            dataset, config.data, batch_size=1, shuffle=config.data.shuffle, source=source
        )
        self._rows = self._epochs()
        self._workers: Iterator[Any] = iter(())
        self._queue = queue
        self._total_prompts = total_prompts
        self._max_in_flight = max_in_flight
        self._budget = StalenessBudget(limit)
        self._in_flight: dict[int, Prompt] = {}
        """Drawn, and not in the queue yet."""
        self._drawn = 0
        self._replaced = 0
        self._draining = False
        self._running = False
        self._handing_over = asyncio.Lock()
        """Held while a sample goes from `_in_flight` to the queue: it is in one of them at any other time."""
        self._changed = asyncio.Condition()
        self._began_s = time.monotonic()
        self._idle_s = 0.0
        self._idle_since_s: float | None = None
        """When nothing was in flight any more, and nothing might be started."""

    async def restore(self, state: RollouterState) -> None:
        """Go on where another one was. Called before `run`."""
        await self._queue.restore.remote(list(state.queued))
        self._dataloader.load_state_dict(state.dataloader)
        self._rows = self._epochs()
        self._drawn, self._replaced = state.drawn, state.replaced
        self._in_flight = {prompt.index: prompt for prompt in state.in_flight}
        self._budget.synced({*self._in_flight, *(sample.index for sample in state.queued)})

    async def state(self) -> RollouterState:
        """A consistent copy, while generation goes on. Nobody may take from the queue meanwhile."""
        async with self._handing_over:
            queued = await self._queue.content.remote()
            return RollouterState(
                self._dataloader.state_dict(),
                self._drawn,
                tuple(self._in_flight.values()),
                tuple(queued),
                self._replaced,
            )

    async def set_max_in_flight(self, limit: int) -> None:
        """Generate at most so many prompts at once from now on: there are more or fewer engines."""
        self._max_in_flight = limit
        async with self._changed:
            self._changed.notify_all()

    async def run(self, workers: Sequence[Any]) -> None:
        """Until `workers`, the agent loops' actors, have brought every prompt of the run into the queue.

        Where some may have to be replaced it is not known which is the last: it goes on until the actor ends.
        Raises the first failure of a sample; called again, it begins with what was in flight then.
        """
        self._workers = itertools.cycle(workers)
        async with self._handing_over:
            unfinished = list(self._in_flight.values())
        self._running = True
        try:
            async with asyncio.TaskGroup() as samples:
                for prompt in unfinished:
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
        """The trainer has taken these and will not train on them: as many more are generated."""
        self._replaced += len(prompts)
        self._budget.give_back(prompts)
        async with self._changed:
            self._changed.notify_all()

    async def drain(self) -> None:
        """Start nothing until `synced`; return when nothing is in flight any more, or `run` has failed."""
        self._draining = True
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._in_flight and self._running))

    async def synced(self) -> dict[str, float]:
        """The engines have a new version. What happened since the last time, as metrics."""
        async with self._handing_over:
            queue: dict[str, float] = await self._queue.metrics.remote()
            outstanding = {*self._in_flight, *await self._queue.indices.remote()}
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
        self._budget.synced(outstanding)
        self._draining = False
        async with self._changed:
            self._changed.notify_all()
        return queue | metrics

    @property
    def _all_drawn(self) -> bool:
        return self._drawn >= self._total_prompts + self._replaced

    async def _may_start(self) -> None:
        def allowed() -> bool:
            waits = self._draining or self._budget.is_spent or len(self._in_flight) >= self._max_in_flight
            return not (waits or self._all_drawn)

        async with self._changed:
            while not allowed():
                if not self._in_flight and self._idle_since_s is None:
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
        samples = DataProto(None, rows.non_tensor_batch, {"validate": False} | how)
        first = index * self._config.actor_rollout_ref.rollout.n
        generated = await next(self._workers).generate_sequences.remote(samples, first)
        return rows.union(generated)

    async def _hand_over(self, sample: Sample) -> None:
        async with self._handing_over:
            await self._queue.put.remote(sample)
            del self._in_flight[sample.index]
        async with self._changed:
            self._changed.notify_all()

    def _draw(self) -> Prompt:
        rows = DataProto.from_dict(non_tensors=next(self._rows))
        rows.non_tensor_batch["uid"] = np.array([uuid.uuid4().hex], dtype=object)
        self._drawn += 1
        return Prompt(self._drawn - 1, rows.repeat(self._config.actor_rollout_ref.rollout.n, interleave=True))

    def _epochs(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._dataloader
