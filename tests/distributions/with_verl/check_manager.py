"""Syncs under PyPI verl's own manager, worker groups and rollout workers, on Ray. Run by `test_for_verl.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
import yaml

from tests.distributions.with_verl.workers import Actor, Replica, RolloutWorker, group, weights_of
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

pytestmark = pytest.mark.timeout(600)


class Job:
    def __init__(self, config: CheckpointEngineConfig) -> None:
        self.actors = group(Actor, 2, config)
        self.rollout = group(RolloutWorker, 2, RolloutConfig(name="vllm", checkpoint_engine=config), None)
        self.replica = Replica(self.rollout.workers)
        self.manager = CheckpointEngineManager(config=config, actor_wg=self.actors, replicas=[self.replica])

    def stale_in(self, step: int) -> list[list[str]]:
        """For each rollout worker, the tensors that are not those of `step`."""
        expected = weights_of(step)
        return [
            sorted(name for name in expected if name not in served or not torch.equal(served[name], expected[name]))
            for served in self.rollout.served()
        ]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=16, include_dashboard=False, object_store_memory=2**28, log_to_driver=False)
    yield
    ray.shutdown()


def test_every_step_arrives_bit_for_bit_and_a_sync_that_was_left_out_is_noticed():
    example = yaml.safe_load(Path(__file__).with_name("verl_sync.yaml").read_text())
    job = Job(CheckpointEngineConfig(**example["actor_rollout_ref"]["rollout"]["checkpoint_engine"]))
    for step in (1, 2, 3):
        job.actors.train(step)
        job.manager.update_weights(global_steps=step)
        assert job.stale_in(step) == [[], []]
    assert "abort_all_requests" in job.replica.calls
    assert "resume_generation" in job.replica.calls
    job.actors.train(4)
    stale = ["embed.weight", "layers.0.bias", "layers.0.weight", "scale"]
    assert job.stale_in(4) == [stale, stale]


def test_a_trainer_that_publishes_nothing_fails_the_sync_by_name():
    module, options = "tests.distributions.with_verl.workers", {"forgetful": {"timeout_s": 5.0}}
    job = Job(CheckpointEngineConfig(backend="forgetful", custom_backend_module=module, engine_kwargs=options))
    with pytest.raises(Exception, match="has not published sync 1 within 5 s; in its arena .* is nothing"):
        job.manager.update_weights(global_steps=1)
