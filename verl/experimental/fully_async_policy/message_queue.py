"""What the rollouter has finished and the trainer has not taken yet: an actor between the two."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.protocol import DataProto
from verl.utils.lifetime import begin_actor
from verl.utils.progress import Progress


@dataclass(frozen=True)
class Sample:
    """One prompt with its `rollout.n` responses: what `AgentLoopWorker` returns, joined with the prompt's columns."""

    index: int
    """Its place in the order in which prompts were drawn."""
    batch: DataProto
    seconds: float
    """From its request until the last token of its last response was there."""
    greedy: DataProto | None = None
    """The likeliest response to the prompt, generated beside the others, for who needs it."""


@dataclass(frozen=True)
class Places:
    """Of samples: see `Sample.index`."""

    queued: tuple[int, ...]
    handed_out: tuple[int, ...]
    """By the last `take`: until the next one it is not known whether they have arrived."""


class MessageQueue:
    """A Ray actor. Bounded: when it is full, `put` waits, which is counted; nothing of its producer is ever dropped.

    One producer at a time, a rollouter, known by its number; one consumer, the trainer.
    """

    def __init__(self, capacity: int) -> None:
        begin_actor()
        self._capacity = capacity
        self._samples: deque[Sample] = deque()
        self._handed_out: tuple[int, ...] = ()
        self._producer = 0
        self._changed = asyncio.Condition()
        self._waits = 0
        self._wanted = 0
        """By who waits in `take`."""

    async def where(self) -> str:
        """The process. Answered at once, so that one that is stopped is known by its silence."""
        return where()

    async def accept(self, producer: int) -> Places:
        """From now on only what `producer` puts is taken in: calls of one before it, which is dead, may arrive late."""
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

    async def progress(self) -> Progress | None:
        """How many of the samples for which the trainer waits are there; None: it does not wait."""
        return Progress(len(self._samples), self._wanted, "prompts") if self._wanted else None

    async def take(self, count: int) -> list[Sample]:
        """Wait for `count` samples, the oldest first; all or none."""
        async with self._changed:
            self._wanted = count
            await self._changed.wait_for(lambda: len(self._samples) >= count)
            self._wanted = 0
            taken = [self._samples.popleft() for _ in range(count)]
            self._handed_out = tuple(sample.index for sample in taken)
            self._changed.notify_all()
            return taken

    async def restore(self, samples: Sequence[Sample]) -> None:
        """Begin with the content of an earlier queue."""
        async with self._changed:
            self._samples = deque(samples)
            self._changed.notify_all()

    async def content(self) -> list[Sample]:
        """A copy; the samples stay."""
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
    """This process, in words."""
    return f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]


def options_of_actor() -> dict[str, Any]:
    """Ray's, for the two actors of this package: they wait more than they compute. Without the driver's machine the run
    ends anyway; without another one it need not."""
    beside_driver = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": beside_driver}
