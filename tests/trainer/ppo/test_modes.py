"""What each way to run makes of the batch sizes of verl's launchers, before anything is started."""

from __future__ import annotations

import pytest

from verl.experimental.fully_async_policy.trainer import FullyAsyncTrainer
from verl.experimental.one_step_off_policy.trainer import OneStepOffPolicyTrainer
from verl.trainer.config.loader import load_config
from verl.trainer.config.validate import validate
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig

MODES = (RayPPOTrainer, OneStepOffPolicyTrainer, FullyAsyncTrainer)


def adapted(mode: type[RayPPOTrainer], *overrides: str) -> PPOConfig:
    config = load_config(["trainer.device=cpu", "trainer.placement=separate", *overrides])
    validate(config)
    return mode.adapted(config)


def test_fully_asynchronous_runs_take_verls_batch_sizes_and_count_for_themselves():
    sizes = ("data.train_batch_size=0", "data.gen_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=24")
    config = adapted(FullyAsyncTrainer, *sizes, "async_training.require_batches=2")
    assert config.data.train_batch_size == 48


@pytest.mark.parametrize("mode", MODES[:2])
def test_other_modes_generate_whole_training_batches(mode: type[RayPPOTrainer]):
    assert adapted(mode, "data.gen_batch_size=64").data.train_batch_size == 64
    with pytest.raises(ConfigError, match=r"data.gen_batch_size=1, but whole .* data.train_batch_size=64"):
        adapted(mode, "data.gen_batch_size=1")
    with pytest.raises(ConfigError, match="data.train_batch_size must be positive, not 0"):
        adapted(mode, "data.train_batch_size=0")


@pytest.mark.parametrize("mode", MODES)
def test_a_number_of_prompts_that_cannot_be_is_named(mode: type[RayPPOTrainer]):
    with pytest.raises(ConfigError, match="data.train_batch_size must be at least 0, not -1"):
        adapted(mode, "data.train_batch_size=-1")
    with pytest.raises(ConfigError, match="data.gen_batch_size=7"):
        adapted(mode, "data.gen_batch_size=7")


def test_a_fully_asynchronous_run_cannot_be_repeated_and_says_why():
    determined = ("trainer.full_determinism=true", "actor_rollout_ref.rollout.exact=true", "data.gen_batch_size=1")
    with pytest.raises(ConfigError, match="the arrival of samples decides"):
        adapted(FullyAsyncTrainer, *determined)
    assert adapted(OneStepOffPolicyTrainer, *determined[:2]).trainer.full_determinism
