"""The rollouter and a trainer that takes from its queue, in one process; agent loops answer when they are told."""

from __future__ import annotations

import asyncio
import functools
import uuid
from contextlib import asynccontextmanager

import pytest
import torch

from verl.experimental.fully_async_policy.message_queue import MessageQueue
from verl.experimental.fully_async_policy.rollouter import Rollouter
from verl.experimental.fully_async_policy.state import Anchor, RollouterState, Since, uid_of
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.workers.config.async_training import AsyncTrainingConfig

N = 2
PROMPTS = 24
RUN = uuid.uuid4().hex


class Remote:
    """An object whose methods are called as those of a Ray actor."""

    def __init__(self, actor):
        self.actor = actor

    def __getattr__(self, name):
        method = getattr(self.actor, name)

        class Call:
            @staticmethod
            def remote(*arguments):
                return asyncio.ensure_future(method(*arguments))

        return Call


class AgentLoops:
    """Answer in an order that is not that of the prompts; fail where they are told to."""

    def __init__(self):
        self.started: list[int] = []
        self.answers = 0
        self.failing: set[int] = set()
        self.held: asyncio.Event | None = None
        self.held_from = 0
        self.forgotten: list[str] = []

    async def forget(self, uids):
        self.forgotten += uids

    async def generate_sequences(self, samples, first_index):
        index = first_index // N
        if samples.meta_info.get("greedy"):
            return DataProto.from_dict(tensors={"responses": torch.full((len(samples), 1), -1 - index)})
        self.started.append(index)
        await asyncio.sleep(0.002 * (index % 3))
        if self.held is not None and index >= self.held_from:
            await self.held.wait()
        if index in self.failing:
            self.failing.discard(index)
            raise ValueError(f"prompt {index} failed")
        self.answers += 1  # as sampled responses, no two are the same
        tensors = {"responses": torch.full((N, 1), index), "log_probs": torch.full((N, 1), self.answers)}
        return DataProto.from_dict(tensors=tensors, non_tensors={})


@functools.cache
def configured(chooses):
    filters = f"algorithm.filter_groups={{enable: {str(chooses).lower()}, metric: acc}}"
    return load_config([f"actor_rollout_ref.rollout.n={N}", "data.shuffle=true", filters])


class Job:
    def __init__(self, required=2, *, max_in_flight=100, chooses=False, asks_greedily=False, **settings):
        config = configured(chooses)
        self.required, self.settings = required, AsyncTrainingConfig(**settings)
        self.limit = self.settings.max_outstanding(required)
        self.loops, self.queue = AgentLoops(), MessageQueue(self.limit)
        self.rollouter = Rollouter(
            config=config,
            dataset=[{"raw_prompt": str(index)} for index in range(PROMPTS)],
            queue=Remote(self.queue),
            total_prompts=PROMPTS,
            limit=self.limit,
            max_in_flight=max_in_flight,
            run=RUN,
            asks_greedily=asks_greedily,
        )

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.rollouter.run([Remote(self.loops)]))
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def outstanding(self):
        """In flight or queued."""
        state = await self.rollouter.state()
        return len(state.in_flight) + len(state.queued)

    async def has_started(self, prompts):
        return len(self.loops.started) >= prompts

    async def some_in_flight_and_some_queued(self):
        state = await self.rollouter.state()
        return state if state.in_flight and state.queued else None

    async def step(self):
        taken = await asyncio.wait_for(self.queue.take(self.required), 60)
        return sorted(sample.index for sample in taken)


async def until(condition):
    """Wait until what the awaitable of `condition` returns is true; return it."""
    async with asyncio.timeout(60):
        while not (found := await condition()):  # noqa: ASYNC110 - what is polled has no event
            await asyncio.sleep(0.005)
    return found


REGIMES = {
    "on policy": {"staleness_threshold": 0, "trigger_parameter_sync_step": 1},
    "streaming": {"staleness_threshold": 0, "trigger_parameter_sync_step": 3},
    "stale": {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 2, "partial_rollout": False},
    "stale with partial rollouts": {"staleness_threshold": 1, "trigger_parameter_sync_step": 1},
}


@pytest.mark.parametrize("settings", REGIMES.values(), ids=REGIMES)
async def test_what_is_in_flight_or_queued_keeps_its_bound_and_every_prompt_is_trained_once(settings):
    job, trained, at_sync = Job(**settings), [], 0
    async with job.running():
        for step in range(1, PROMPTS // job.required + 1):
            trained += await job.step()
            await asyncio.sleep(0.02)  # the trainer works; the rollouter may go as far as it can
            assert await job.outstanding() <= job.limit
            assert len(job.loops.started) - at_sync <= job.limit
            if step % job.settings.trigger_parameter_sync_step == 0:
                if not job.settings.partial_rollout:
                    await job.rollouter.drain(1)
                    assert not (await job.rollouter.state()).in_flight
                at_sync = len(job.loops.started) - await job.outstanding()
                await job.rollouter.synced()
    assert sorted(trained) == list(range(PROMPTS))


async def test_without_staleness_a_step_is_trained_on_what_was_started_after_the_last_sync():
    job = Job(**REGIMES["on policy"])
    async with job.running():
        for step in range(3):
            assert await job.step() == [2 * step, 2 * step + 1]
            await asyncio.sleep(0.02)  # nothing shall happen
            assert len(job.loops.started) == 2 * (step + 1)
            metrics, _ = await job.rollouter.synced()
            assert metrics["fully_async/count/staleness_samples"] == 0
            assert metrics["fully_async/rollouter/idle_ratio"] > 0


@pytest.mark.parametrize("settings", REGIMES.values(), ids=REGIMES)
async def test_what_is_not_trained_on_is_replaced_within_the_bound_until_every_step_is_full(settings):
    job, at_sync, replaced = Job(chooses=True, **settings), 0, 0
    steps = PROMPTS // job.required
    async with job.running():
        for step in range(1, steps + 1):
            kept: list[int] = []
            while len(kept) < job.required:
                samples = await asyncio.wait_for(job.queue.take(job.required - len(kept)), 60)
                taken = [sample.index for sample in samples]
                others = [index for index in taken if index % 3 == 0]
                kept += [index for index in taken if index % 3]
                await job.rollouter.replace(others)
                replaced += len(others)
                assert await job.outstanding() <= job.limit
            await asyncio.sleep(0.02)  # the trainer works; the rollouter may go as far as it can
            assert len(job.loops.started) - at_sync <= job.limit + replaced
            if step % job.settings.trigger_parameter_sync_step == 0:
                if not job.settings.partial_rollout:
                    await job.rollouter.drain(1)
                at_sync = len(job.loops.started) - await job.outstanding()
                await job.rollouter.synced()
                replaced = 0
        state = await job.rollouter.state()
    assert state.drawn == PROMPTS + state.replaced
    assert state.replaced > 0


async def test_what_was_replaced_is_known_to_a_rollouter_that_is_restored():
    first = Job(chooses=True, **REGIMES["on policy"])
    async with first.running():
        assert await first.step() == [0, 1]
        await first.rollouter.replace([1])
        (replacement,) = await asyncio.wait_for(first.queue.take(1), 60)
        state = RollouterState.from_plain((await first.rollouter.state()).to_plain(), {})
    assert (replacement.index, state.drawn, state.replaced) == (2, 3, 1)


async def test_a_greedy_response_is_generated_beside_the_others():
    job = Job(asks_greedily=True)
    async with job.running():
        samples = await asyncio.wait_for(job.queue.take(2), 60)
    for sample in samples:
        assert sample.batch.batch["responses"].tolist() == [[sample.index]] * N
        assert sample.greedy.batch["responses"].tolist() == [[-1 - sample.index]]
        assert sample.greedy.non_tensor_batch["uid"][0] == sample.batch.non_tensor_batch["uid"][0]


async def test_no_more_prompts_are_in_flight_than_the_replicas_may_have():
    job = Job(staleness_threshold=3, max_in_flight=3)
    job.loops.held = asyncio.Event()
    async with job.running():
        await until(lambda: job.has_started(3))
        await asyncio.sleep(0.05)  # nothing shall happen
        assert len(job.loops.started) == 3
        job.loops.held.set()
        await until(lambda: job.has_started(PROMPTS))


async def test_draining_waits_for_a_run_that_was_asked_for_before_and_arrives_later():
    job = Job(staleness_threshold=3)
    job.loops.failing = {5}
    with pytest.raises(ValueError, match="prompt 5 failed"):
        await job.rollouter.run([Remote(job.loops)])
    draining = asyncio.create_task(job.rollouter.drain(2))
    await asyncio.sleep(0.02)  # nothing shall happen
    assert not draining.done()
    async with job.running():
        await asyncio.wait_for(draining, 60)
        assert not (await job.rollouter.state()).in_flight


async def test_a_sample_that_fails_ends_the_run_with_its_own_error_and_it_alone_is_generated_again_in_the_next():
    job = Job(staleness_threshold=3)
    job.loops.failing = {5}
    with pytest.raises(ValueError, match="prompt 5 failed"):
        await job.rollouter.run([Remote(job.loops)])
    await job.rollouter.drain(1)  # nobody waits for what has failed
    await job.rollouter.synced()
    trained = []
    async with job.running():
        for _ in range(PROMPTS // job.required):
            trained += await job.step()
            await job.rollouter.synced()
    assert sorted(trained) == list(range(PROMPTS))
    assert sorted(job.loops.started) == sorted([*range(PROMPTS), 5])
    trained_before = [uid_of(RUN, index) for index in trained[: -job.required]]  # the last sync came after these
    assert set(trained_before) <= set(job.loops.forgotten) <= {uid_of(RUN, index) for index in trained}


async def test_a_rollouter_that_is_restored_generates_what_was_in_flight_and_then_what_comes_next():
    first = Job(staleness_threshold=1, trigger_parameter_sync_step=2)
    first.loops.held, first.loops.held_from = asyncio.Event(), 5
    async with first.running():
        trained = await first.step()
        await first.rollouter.synced()
        state = await until(first.some_in_flight_and_some_queued)

    second = Job(staleness_threshold=1, trigger_parameter_sync_step=2)
    await second.queue.restore(state.queued)
    there = frozenset(sample.index for sample in state.queued)
    await second.rollouter.restore(Anchor.of(state), Since(there))
    prompts = {}
    async with second.running():
        for _ in range((PROMPTS - len(trained)) // second.required):
            for sample in await asyncio.wait_for(second.queue.take(second.required), 60):
                trained.append(sample.index)
                prompts[sample.index] = sample.batch.non_tensor_batch["raw_prompt"][0]
            await second.rollouter.synced()
    assert sorted(trained) == list(range(PROMPTS))
    assert len(set(prompts.values())) == len(prompts)  # the data goes on where it was


@pytest.mark.parametrize("settings", REGIMES.values(), ids=REGIMES)
async def test_what_a_killed_run_had_finished_is_trained_on_first_and_the_rest_begins_within_the_bound(settings):
    first = Job(staleness_threshold=9)
    first.loops.held, first.loops.held_from = asyncio.Event(), 11
    async with first.running():
        finished = await asyncio.wait_for(first.queue.take(11), 60)
    finished = [sample for sample in finished if sample.index not in (4, 7)]  # these were in flight

    job, trained, started_before = Job(**settings), [], []
    beginning = RollouterState((await job.rollouter.state()).dataloader, 0, (), tuple(finished))
    await job.queue.restore(finished)
    await job.rollouter.restore(Anchor.of(beginning), Since(frozenset(sample.index for sample in finished)))
    per_sync = job.settings.trigger_parameter_sync_step
    async with job.running():
        for step in range(PROMPTS // job.required):
            await asyncio.sleep(0.02)  # the rollouter may go as far as it can
            for index in await job.step():
                if index in job.loops.started:
                    place = job.loops.started.index(index)
                    version = sum(before <= place for before in started_before)
                    assert len(started_before) - version <= (job.limit - 1) // (job.required * per_sync)
                trained.append(index)
            if (step + 1) % per_sync == 0:
                if not job.settings.partial_rollout:
                    await job.rollouter.drain(1)
                started_before.append(len(job.loops.started))
                await job.rollouter.synced()
    assert set(trained[:8]) <= {sample.index for sample in finished}
    assert sorted(trained) == list(range(PROMPTS))
    assert sorted(job.loops.started) == sorted(set(range(PROMPTS)) - {sample.index for sample in finished})
