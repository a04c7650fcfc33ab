import numpy as np
import pytest

from verl.protocol import DataProto
from verl.trainer.fleet.recovery import REPLICAS, SERVICE, Recovery
from verl.trainer.ppo.generation import HealingRollouts

PROMPTS = DataProto.from_dict(non_tensors={"uid": np.array(["a", "b"], dtype=object)})


class Rollouts:
    """Fails as often as it is told to; `dead_workers` are found when it is next given servers."""

    def __init__(self, failures, dead_workers=0):
        self.failures = failures
        self.dead_workers = dead_workers
        self.batches = 0
        self.servers = ["first"]

    def generate_sequences(self, prompts):
        self.batches += 1
        if self.batches <= self.failures:
            raise RuntimeError(f"{self.servers} failed")
        return prompts

    def set_servers(self, server_handles):
        self.servers = server_handles
        restarted, self.dead_workers = self.dead_workers, 0
        return restarted


class Engines:
    """`dead[n]` engines are found dead the n-th time."""

    def __init__(self, *dead):
        self.dead = list(dead)
        self.servers = ["first"]

    def heal(self):
        healed = self.dead.pop(0) if self.dead else 0
        self.servers = ["second"] if healed else self.servers
        return healed


def healing(rollouts, engines, max_restarts=2):
    recovery = Recovery(max_restarts=max_restarts)
    recovery.watch(REPLICAS, engines.heal)
    return HealingRollouts(rollouts, lambda: engines.servers, recovery), recovery


def test_a_batch_whose_engine_died_is_generated_again_on_the_restarted_one():
    rollouts = Rollouts(failures=1)
    assert healing(rollouts, Engines(1))[0].generate_sequences(PROMPTS) is PROMPTS
    assert rollouts.batches == 2
    assert rollouts.servers == ["second"]


def test_what_is_generated_in_the_background_is_healed_by_whoever_asks_for_it():
    rollouts = Rollouts(failures=1)
    generation = healing(rollouts, Engines(1))[0].start(PROMPTS)
    with pytest.raises(RuntimeError, match="first"):
        generation.future.result(timeout=60)
    assert rollouts.servers == ["first"]
    assert generation.result() is PROMPTS
    assert rollouts.batches == 2
    assert rollouts.servers == ["second"]


def test_a_batch_in_the_background_is_generated_again_when_a_sync_has_restarted_its_engine_by_then():
    rollouts = Rollouts(failures=1)
    healed, recovery = healing(rollouts, Engines(1))
    generation = healed.start(PROMPTS)
    with pytest.raises(RuntimeError, match="first"):
        generation.future.result(timeout=60)
    recovery.look(SERVICE)
    assert generation.result() is PROMPTS
    assert rollouts.batches == 2


def test_a_batch_whose_worker_died_is_generated_again():
    rollouts = Rollouts(failures=1, dead_workers=1)
    assert healing(rollouts, Engines(0))[0].generate_sequences(PROMPTS) is PROMPTS
    assert rollouts.batches == 2


def test_a_batch_in_the_background_is_generated_again_when_a_sync_has_restarted_its_worker_by_then():
    rollouts = Rollouts(failures=1, dead_workers=1)
    healed, _ = healing(rollouts, Engines(0))
    generation = healed.start(PROMPTS)
    with pytest.raises(RuntimeError, match="first"):
        generation.future.result(timeout=60)
    assert healed.set_servers(["first"]) == 1
    assert generation.result() is PROMPTS


def test_what_was_generated_in_the_background_is_not_generated_again():
    rollouts = Rollouts(failures=0)
    assert healing(rollouts, Engines())[0].start(PROMPTS).result() is PROMPTS
    assert rollouts.batches == 1


def test_a_failure_of_another_kind_is_raised_at_once():
    rollouts = Rollouts(failures=1)
    with pytest.raises(RuntimeError, match="first"):
        healing(rollouts, Engines(0))[0].generate_sequences(PROMPTS)
    assert rollouts.batches == 1


def test_engines_that_keep_dying_end_the_run():
    rollouts = Rollouts(failures=10)
    with pytest.raises(RuntimeError, match="second"):
        healing(rollouts, Engines(1, 1, 1, 1))[0].generate_sequences(PROMPTS)
    assert rollouts.batches == 3


def test_restarts_can_be_forbidden():
    rollouts = Rollouts(failures=1)
    with pytest.raises(RuntimeError):
        healing(rollouts, Engines(1), max_restarts=0)[0].generate_sequences(PROMPTS)
