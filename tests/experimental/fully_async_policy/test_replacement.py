"""Rollouters that die at any moment, and those that take their places: no prompt is lost, and none is trained twice."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.experimental.fully_async_policy.test_rollouter import PROMPTS, REGIMES, Job, Remote
from verl.experimental.fully_async_policy.message_queue import MessageQueue, Sample
from verl.experimental.fully_async_policy.state import Anchor, RollouterState, Since, uid_of
from verl.protocol import DataProto


class Driver:
    """What `Supply` knows, of a run in one process."""

    def __init__(self, settings, *, chooses=False):
        self.settings, self.chooses = settings, chooses
        self.job = Job(chooses=chooses, **settings)
        self.queue = self.job.queue
        self.anchor = Anchor.of(RollouterState.at_beginning({"epoch": 0, "position": 0, "data": _identity(self.job)}))
        self.taken: list[Sample] = []
        self.given_back: set[int] = set()
        self.number = 0
        self.running: asyncio.Task[None] | None = None

    async def start(self, *, with_queue):
        """A rollouter in the place of the one there is, which is dead from now on; its last calls still arrive."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        held, job = self.job, Job(chooses=self.chooses, **self.settings)
        job.loops.started, job.loops.answers = held.loops.started, held.loops.answers
        taken = {sample.index for sample in self.taken}
        if with_queue:
            self.queue = job.queue
            await self.queue.restore([sample for sample in self.anchor.state.queued if sample.index not in taken])
        job.queue, job.rollouter._queue = self.queue, Remote(self.queue)
        self.number += 1
        job.rollouter._number = self.number
        places = await self.queue.accept(self.number)
        there = frozenset((*taken, *places.queued, *places.handed_out))
        await job.rollouter.restore(self.anchor, Since(there, frozenset(self.given_back), len(self.given_back)))
        self.job = job
        self.running = asyncio.create_task(job.rollouter.run([Remote(job.loops)]))

    async def take(self, count):
        samples = await asyncio.wait_for(self.queue.take(count), 60)
        self.taken += samples
        return [sample.index for sample in samples]

    async def give_back(self, prompts):
        self.given_back.update(prompts)
        await self.job.rollouter.replace(prompts)

    async def sync(self):
        if not self.job.settings.partial_rollout:
            await self.job.rollouter.drain(1)
        _, self.anchor = await self.job.rollouter.synced()


def _identity(job):
    return job.rollouter._dataloader.state_dict()["data"]


async def run(settings, seed, *, chooses=False):
    """Deaths of the rollouter, or of both, before, between and after whatever the trainer does."""
    chance = random.Random(seed)
    driver, steps, deaths = Driver(settings, chooses=chooses), 0, 0
    at_sync = replaced = 0

    async def may_die():
        nonlocal deaths
        await asyncio.sleep(chance.choice((0.0, 0.001, 0.01)))
        if chance.random() < 0.35:
            deaths += 1
            await driver.start(with_queue=chance.random() < 0.4)

    await driver.start(with_queue=True)
    required, trained = driver.job.required, []
    while steps < PROMPTS // required:
        steps += 1
        kept: list[int] = []
        while len(kept) < required:
            await may_die()
            taken = await driver.take(required - len(kept))
            await may_die()
            others = [index for index in taken if chooses and index % 3 == 0]
            kept += [index for index in taken if index not in others]
            if others:
                await driver.give_back(others)
        trained += kept
        await may_die()
        outstanding = await driver.job.outstanding()
        assert outstanding <= driver.job.limit
        assert len(set(driver.job.loops.started)) - at_sync <= driver.job.limit + len(driver.given_back) - replaced
        if steps % driver.job.settings.trigger_parameter_sync_step == 0:
            await driver.sync()
            at_sync, replaced = len(set(driver.job.loops.started)) - len(driver.anchor.counted), len(driver.given_back)
            await may_die()
    driver.running.cancel()
    await asyncio.gather(driver.running, return_exceptions=True)
    return driver, trained, deaths


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", REGIMES.values(), ids=REGIMES)
async def test_every_prompt_is_trained_once_whenever_rollouters_and_queues_die(settings, seed):
    driver, trained, deaths = await run(settings, seed)
    assert deaths
    assert sorted(trained) == list(range(PROMPTS))
    uids = {sample.index: set(sample.batch.non_tensor_batch["uid"]) for sample in driver.taken}
    assert len(set.union(*uids.values())) == PROMPTS
    questions = [sample.batch.non_tensor_batch["raw_prompt"][0] for sample in driver.taken]
    assert len(set(questions)) == PROMPTS


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", REGIMES.values(), ids=REGIMES)
async def test_what_is_not_trained_on_is_replaced_once_whenever_they_die(settings, seed):
    driver, trained, deaths = await run(settings, seed, chooses=True)
    assert deaths
    assert len(set(trained)) == len(trained) == PROMPTS
    taken = [sample.index for sample in driver.taken]
    assert len(set(taken)) == len(taken)
    assert set(taken) - driver.given_back == set(trained)


async def test_a_prompt_has_its_uid_again_when_it_is_drawn_again():
    driver = Driver(REGIMES["stale"])
    await driver.start(with_queue=True)
    first = {prompt.index: prompt.rows.non_tensor_batch["uid"][0] for prompt in await _in_flight(driver)}
    await driver.start(with_queue=True)
    again = {prompt.index: prompt.rows.non_tensor_batch["uid"][0] for prompt in await _in_flight(driver)}
    assert first
    assert first == again
    driver.running.cancel()


async def _in_flight(driver):
    loops = driver.job.loops
    loops.held = asyncio.Event()
    await asyncio.sleep(0.01)
    return (await driver.job.rollouter.state()).in_flight


async def test_what_a_dead_producer_put_last_is_not_taken_in():
    queue, batch = MessageQueue(capacity=1), DataProto.from_dict(non_tensors={"index": [0]})
    await queue.put(Sample(0, batch, 1.0), 0)
    late = asyncio.create_task(queue.put(Sample(1, batch, 1.0), 0))  # the queue is full
    await asyncio.sleep(0)
    assert (await queue.accept(1)).queued == (0,)
    await queue.take(1)
    await late
    places = await queue.places()
    assert (places.queued, places.handed_out) == ((), (0,))


def test_uids_differ_between_prompts_and_between_runs():
    runs = ("0" * 32, "1" * 32)
    assert len({uid_of(run, index) for run in runs for index in range(100)}) == 200
