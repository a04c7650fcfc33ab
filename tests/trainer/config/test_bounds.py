"""Every number of the configuration is looked at before anything starts."""

import re

import pytest

from verl.trainer.config.loader import load_config
from verl.trainer.config.schema import documented_sections
from verl.utils.config import ConfigError

NUMBERS = [
    key
    for section in documented_sections()
    for key in section.keys
    if re.search(r"\b(int|float)\b", key.type) and not key.choices
]
ANY_NUMBER = {
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ub",
    "algorithm.gdpo_reward_weights",
}


def test_every_number_says_which_values_it_takes():
    assert len(NUMBERS) > 100
    assert {key.path for key in NUMBERS if not key.bounds} == ANY_NUMBER


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.ppo_epochs=0", "must be at least 1, not 0"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "must be above 1, not 1.0"),
        ("actor_rollout_ref.actor.grad_clip=0", "must be above 0, not 0.0"),
        ("actor_rollout_ref.actor.entropy_coeff=nan", "must be finite, not nan"),
        ("actor_rollout_ref.actor.optim.lr=inf", "must be finite, not inf"),
        ("actor_rollout_ref.rollout.top_p=1.5", "must be above 0 and at most 1, not 1.5"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=90", "must be above 0 and at most 1, not 90.0"),
        ("data.seed=-1", "must be at least 0 and below 4294967296, not -1"),
        ("data.val_batch_size=0", "must be at least 1, not 0"),
        ("async_training.staleness_threshold=nan", "must be finite, not nan"),
        ("checkpoint_engine.deadlines.stage_s=-1", "must be above 0, not -1.0"),
        ("trainer.total_training_steps=0", "must be at least 1, not 0"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_its_whole_key(override, message):
    key, _, _ = override.partition("=")
    with pytest.raises(ConfigError) as raised:
        load_config([override])
    assert str(raised.value) == f"{key} {message}"


def test_bounds_of_a_list_hold_for_each_number():
    with pytest.raises(ConfigError, match=r"optim\.betas\[1\] must be at least 0 and below 1, not 1\.0"):
        load_config(["actor_rollout_ref.actor.optim.betas=[0.9,1]"])


def test_null_is_no_number():
    assert load_config(["actor_rollout_ref.actor.clip_ratio_low=null"]).actor_rollout_ref.actor.clip_ratio_low is None
