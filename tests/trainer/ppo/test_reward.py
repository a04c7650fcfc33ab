"""Scoring under verl's names."""

from __future__ import annotations

import pytest
import torch

from tests.workers.reward_manager.test_naive import TOKENIZER, make_batch
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.reward import compute_reward, get_custom_reward_fn, load_reward_manager
from verl.utils.config import ConfigError
from verl.workers.config.algorithm import OverlongBufferConfig

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": scale * len(solution_str), "right": solution_str == ground_truth}
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "reward.py").write_text(FUNCTION)
    return load_config(
        [
            "trainer.device=cpu",
            f"custom_reward_function.path={tmp_path / 'reward.py'}",
            "custom_reward_function.reward_kwargs.scale=2.0",
            "reward_model.reward_manager=dapo",
            "data.max_response_length=5",
        ]
    )


def test_a_function_of_ones_own_comes_with_its_arguments(config):
    function = get_custom_reward_fn(config)
    found = function(data_source="a", solution_str="12", ground_truth="12", extra_info=None)
    assert found == {"score": 4.0, "right": True}
    assert get_custom_reward_fn(load_config(["trainer.device=cpu"])) is None


def test_the_manager_of_a_configuration_scores_a_batch(config):
    with load_reward_manager(config, TOKENIZER) as manager:
        rewards, extra = compute_reward(make_batch(["7", "123"], truths=["7", "8"]), manager)
    assert rewards.sum(-1).tolist() == [2.0, 6.0]
    assert extra == {"right": [True, False]}


def test_arguments_of_the_manager_go_before_those_of_the_configuration(config):
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=1.0)
    with load_reward_manager(config, TOKENIZER, overlong_buffer_cfg=buffer) as manager:
        rewards, _ = compute_reward(make_batch(["7", "123"]), manager)
    assert rewards.sum(-1).tolist() == [2.0 - 1 / 4, 6.0 - 3 / 4]  # of two and of four tokens, where one is free
    with pytest.raises(ConfigError, match=r"load_reward_manager\(max_resp_length=.*Did you mean 'max_resp_len'"):
        load_reward_manager(config, TOKENIZER, max_resp_length=8)


@pytest.mark.parametrize(("name", "known"), [("gdpo", ["of today"]), ("naive", [])])
def test_the_manager_gdpo_tells_the_function_the_name_of_the_run(tmp_path, name, known):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    run = extra_info.get('experiment_name')\n"
        "    return {'score': 1.0, **({'run': run} if run else {})}"
    )
    options = ["trainer.device=cpu", f"custom_reward_function.path={tmp_path / 'reward.py'}"]
    options += [f"reward_model.reward_manager={name}", "trainer.experiment_name=of today"]
    with load_reward_manager(load_config(options), TOKENIZER) as manager:
        _, extra = compute_reward(make_batch(["7"]), manager)
    assert extra.get("run", []) == known


def test_a_manager_that_is_written_as_verls_is_called_as_verl_calls_it():
    rewards = torch.ones(1, 2)

    def manager(data, return_dict):
        assert return_dict
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": [1.0]}}

    assert compute_reward(None, manager) == (rewards, {"acc": [1.0]})
