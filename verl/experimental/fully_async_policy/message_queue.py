"""The actor that queues finished samples between rollouter and trainer."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.protocol import DataProto
from verl.trainer.kept_samples import KeptSamples
from verl.utils.lifetime import begin_actor
from verl.utils.progress import Progress


@dataclass(frozen=True)
class Sample:
    """One prompt with its `rollout.n` responses: what `AgentLoopWorker` returns, joined with the prompt's columns."""

    index: int
    """The prompt's index in the order of drawing."""
    batch: DataProto
    seconds: float
    """Seconds from its request to the last token of its last response."""
    greedy: DataProto | None = None
    """The greedy response to the prompt, if the estimator needs it."""

    @property
    def content(self) -> tuple[int, DataProto, float, DataProto | None]:
        """The arguments that make it."""
        return self.index, self.batch, self.seconds, self.greedy


@dataclass(frozen=True)
class Places:
    """Indices of samples: see `Sample.index`."""

    queued: tuple[int, ...]
    handed_out: tuple[int, ...]
    """Returned by the last `take`. Only the next `take` confirms that the trainer got them."""


class MessageQueue:
    """A Ray actor with a bounded queue. `put` waits while it is full, and counts the waits; no sample is dropped.

    It has one producer at a time, the rollouter with the present number, and one consumer, the trainer.
    """

    def __init__(self, capacity: int, kept: KeptSamples | None = None, file: int = 0) -> None:
        """`kept` gets what is put, in the file with the number `file` until `content` is called for a checkpoint."""
        begin_actor()
        self._capacity = capacity
        self._kept, self._file = kept, file
        self._keeping = ThreadPoolExecutor(1, thread_name_prefix="keep-tokens")
        if kept is not None:
            self._keeping.submit(kept.begin, file)
        self._samples: deque[Sample] = deque()
        self._handed_out: tuple[int, ...] = ()
        self._producer = 0
        self._changed = asyncio.Condition()
        self._waits = 0
        self._wanted = 0
        """By who waits in `take`."""

    async def where(self) -> str:
        """The process, as text. Answers at once, so that silence means a stopped process."""
        return where()

    async def accept(self, producer: int) -> Places:
        """Accept samples of `producer` only from now on, because calls of a dead one may arrive late."""
        async with self._changed:
            self._producer = producer
            self._changed.notify_all()
        return await self.places()

    async def put(self, sample: Sample, producer: int = 0) -> None:
        async with self._changed:
            if len(self._samples) >= self._capacity:
                self._waits += 1
                await self._changed.wait_for(lambda: len(self._samples) < self._capacity)
            if producer == self._producer:
                self._samples.append(sample)
                self._changed.notify_all()
                if self._kept is not None:
                    self._keeping.submit(self._kept.append, self._file, sample.content, sample.batch)

    async def progress(self) -> Progress | None:
        """How many of the samples that the trainer waits for are queued; None if it does not wait."""
        return Progress(len(self._samples), self._wanted, "prompts") if self._wanted else None

    async def take(self, count: int) -> list[Sample]:
        """Wait for `count` samples and return all of them, the oldest first."""
        async with self._changed:
            self._wanted = count
            await self._changed.wait_for(lambda: len(self._samples) >= count)
            self._wanted = 0
            taken = [self._samples.popleft() for _ in range(count)]
            self._handed_out = tuple(sample.index for sample in taken)
            self._changed.notify_all()
            return taken

    async def restore(self, samples: Sequence[Sample]) -> None:
        """Start with the content of an earlier queue."""
        async with self._changed:
            self._samples = deque(samples)
            self._changed.notify_all()

    async def content(self, step: int | None = None) -> list[Sample]:
        """A copy of the queue's samples. With `step`, it is for the checkpoint of that step, which the next ones
        follow."""
        if step is not None and self._kept is not None:
            self._file = max(self._file, step)  # later ones are of a run that was resumed from before `step`
            self._keeping.submit(self._kept.begin, step)
        return list(self._samples)

    async def places(self) -> Places:
        return Places(tuple(sample.index for sample in self._samples), self._handed_out)

    async def metrics(self) -> dict[str, float]:
        return {
            "fully_async/count/queue_size": float(len(self._samples)),
            "fully_async/count/full_queue_waits": float(self._waits),
            "fully_async/count/dropped_stale_samples": 0.0,
        }


def where() -> str:
    """This process's id and address, as text."""
    return f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]


def options_of_actor() -> dict[str, Any]:
    """Ray's options for this package's two actors, which mostly wait. They run on the driver's machine: its loss ends
    the run anyway."""
    beside_driver = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": beside_driver}
