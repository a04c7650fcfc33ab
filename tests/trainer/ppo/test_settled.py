"""What a configuration leaves open is filled in, and what it says stays."""

from __future__ import annotations

from pathlib import Path

from verl.trainer.config.loader import load_config
from verl.trainer.ppo.settled import scheduled, settled, total_steps
from verl.utils import builtin

ROLLOUT = "actor_rollout_ref.rollout"


def test_engines_get_the_lengths_the_traces_and_the_check_of_other_sections():
    config = settled(
        load_config(
            ["data.max_prompt_length=12", "data.max_response_length=8", "checkpoint_engine.check_engine=always"]
        )
    )
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.prompt_length, rollout.response_length) == (12, 8)
    assert rollout.checkpoint_engine == {"check_engine": "always"}
    assert rollout.profiler.save_path == config.profile_directory
    assert Path(config.profile_directory).is_absolute()
    assert settled(config) == config


def test_what_the_user_says_of_an_engine_stays():
    said = [f"{ROLLOUT}.prompt_length=5", f"{ROLLOUT}.response_length=6", f"{ROLLOUT}.profiler.save_path=/traces"]
    rollout = settled(load_config(said)).actor_rollout_ref.rollout
    assert (rollout.prompt_length, rollout.response_length, rollout.profiler.save_path) == (5, 6, "/traces")


def test_a_run_has_as_many_steps_as_it_is_told_or_as_its_data_give():
    assert total_steps(load_config(), 10) == builtin.TRAINING_STEPS
    assert total_steps(load_config(["data.train_files=a.parquet", "trainer.total_epochs=3"]), 10) == 30
    assert total_steps(load_config(["data.train_files=a.parquet", "trainer.total_training_steps=7"]), 10) == 7


def test_rates_of_built_in_models_are_theirs_and_those_of_others_the_default():
    assert scheduled(load_config(), 9).actor_rollout_ref.actor.optim.lr == builtin.LEARNING_RATE
    own = scheduled(load_config(["actor_rollout_ref.model.path=/model"]), 9)
    assert own.actor_rollout_ref.actor.optim.lr == own.actor_rollout_ref.actor.optim.peak_lr
    assert own.critic.optim.total_training_steps == own.actor_rollout_ref.actor.optim.total_training_steps == 9


def test_a_rate_and_a_schedule_of_the_user_s_stay():
    optim = "actor_rollout_ref.actor.optim"
    config = scheduled(load_config([f"{optim}.lr=0.5", f"{optim}.total_training_steps=4"]), 9)
    assert (config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.actor.optim.total_training_steps) == (
        0.5,
        4,
    )
