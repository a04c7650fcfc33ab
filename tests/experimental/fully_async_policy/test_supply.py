"""Rollouter and queue as actors of Ray, which does not keep the order of the calls to them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import ray

from tests.experimental.fully_async_policy.test_rollouter import PROMPTS, RUN, AgentLoops, configured
from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.experimental.fully_async_policy import supply as module
from verl.experimental.fully_async_policy.rollouter import Rollouter
from verl.experimental.fully_async_policy.state import RollouterState
from verl.experimental.fully_async_policy.supply import Supply, Terms
from verl.trainer.fleet.recovery import RestartLimit
from verl.utils.dataset import build_dataloader

AT_ONCE = 8


class RestoredLate(Rollouter):
    """Gets its state after what is asked of it later, as may happen."""

    async def restore(self, anchor, since):
        await asyncio.sleep(1.0)
        await super().restore(anchor, since)


@pytest.fixture
def loop():
    one = LoopThread("supply")
    yield one
    one.close()


@pytest.fixture
def supply(ray_cluster, loop, monkeypatch):
    monkeypatch.setattr(module, "Rollouter", RestoredLate)
    config, dataset = configured(False), [{"raw_prompt": str(index)} for index in range(PROMPTS)]
    loader = build_dataloader(dataset, config.data, batch_size=1, shuffle=True)
    loops = ray.remote(AgentLoops).remote()
    one = Supply(
        Terms(config, dataset, source="", asks_greedily=False, total_prompts=PROMPTS, limit=AT_ONCE, run=RUN),
        resumed=RollouterState.at_beginning(loader.state_dict()),
        rollouts=SimpleNamespace(workers=[loops], changes=0),
        follow_replicas=lambda: None,
        max_in_flight=lambda: AT_ONCE,
        loop=loop,
        limit=RestartLimit(PROMPTS, 3600.0),
    )
    yield one
    one.close()
    ray.kill(loops)


def within(seconds):
    """What may be called meanwhile, until then."""
    until_s = time.monotonic() + seconds

    def meanwhile():
        assert time.monotonic() < until_s, "nothing is generated any more"

    return meanwhile


async def told(supply):
    """Of a version that the engines have, as soon as there is a rollouter that can be told."""
    while await supply.synced() is None:  # noqa: ASYNC110 - what is asked again has no event
        await asyncio.sleep(0.001)


def test_a_sync_that_ends_while_another_rollouter_starts_stops_nobody_and_every_prompt_is_generated_once(supply, loop):
    trained = []
    while len(trained) < PROMPTS:
        trained += [sample.index for sample in supply.take(AT_ONCE, within(120))]
        supply.drain()
        os.kill(int(re.match(r"pid (\d+)", supply._rollouter.where)[1]), signal.SIGKILL)
        syncing = loop.start(told(supply))
        supply.state()
        syncing.result(120)
    assert sorted(trained) == list(range(PROMPTS))
