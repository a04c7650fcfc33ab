import pytest
import torch

from tests.workers.reward_manager.test_naive import TOKENIZER, make_batch
from verl.utils.config import ConfigError, from_mapping
from verl.workers.config import RewardModelConfig
from verl.workers.reward_manager import NaiveRewardManager, OverlongPenalty, overlong_penalty


def configured(**buffer):
    return from_mapping(
        RewardModelConfig,
        {
            "reward_manager": "dapo",
            "reward_kwargs": {
                "max_resp_len": 20480,
                "overlong_buffer_cfg": {"enable": True, "len": 4096, "penalty_factor": 1.0, **buffer},
            },
        },
    )


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (24576, -2.0)]
)
def test_the_penalty_grows_by_a_straight_line_over_the_buffer(length, penalty):
    # The numbers of the paper: 16384 expected tokens, a buffer of 4096.
    assert overlong_penalty(configured(), 100)(length) == pytest.approx(penalty)


def test_without_the_switch_there_is_none():
    assert overlong_penalty(configured(enable=False), 100) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward_manager": "naive", "reward_kwargs": {"max_resp_len": 8}}, "needs reward_model.reward_manager=dapo"),
        ({"reward_manager": "dapo"}, "len=4 must be above 0 and at most data.max_response_length=3"),
        ({"reward_manager": "dapo", "reward_kwargs": {"max_resp_len": 3}}, "len=4 must be above 0 and at most"),
    ],
)
def test_a_buffer_that_cannot_be_meant_is_refused(values, message):
    buffer = {"overlong_buffer_cfg": {"enable": True, "len": 4}}
    given = {**values, "reward_kwargs": {**values.get("reward_kwargs", {}), **buffer}}
    with pytest.raises(ConfigError, match=message):
        overlong_penalty(from_mapping(RewardModelConfig, given), 3)


def test_the_penalty_is_part_of_the_reward_and_of_the_metrics_if_asked_for():
    penalty = OverlongPenalty(max_length=4, buffer_length=2, factor=1.0, log=True)
    manager = NaiveRewardManager(TOKENIZER, lambda **_: {"score": 1.0, "acc": True}, penalty=penalty)
    with manager:
        output = manager(make_batch(["8", "12", "123"]))  # and an end token each
    assert torch.equal(output.reward_tensor.sum(-1), torch.tensor([1.0, 0.5, 0.0]))
    assert output.extra_info == {
        "acc": [True] * 3,
        "overlong_reward": [0.0, -0.5, -1.0],
        "overlong": [False, True, True],
    }
