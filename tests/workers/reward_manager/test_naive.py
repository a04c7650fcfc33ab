import threading

import pytest
import torch

from verl.protocol import DataProto
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import NaiveRewardManager, RewardError

TOKENIZER = build_tokenizer()
PROMPT_LENGTH, RESPONSE_LENGTH = 4, 5


def make_batch(responses, truths=None):
    """Responses as the rollout engine returns them: text, end token, padding."""
    rows = [[*TOKENIZER.encode(text), TOKENIZER.eos_token_id][:RESPONSE_LENGTH] if text else [] for text in responses]
    padded = [row + [TOKENIZER.pad_token_id] * (RESPONSE_LENGTH - len(row)) for row in rows]
    mask = [[1] * (PROMPT_LENGTH + len(row)) + [0] * (RESPONSE_LENGTH - len(row)) for row in rows]
    return DataProto.from_dict(
        tensors={"responses": torch.tensor(padded), "attention_mask": torch.tensor(mask)},
        non_tensors={
            "uid": [f"uid-{index}" for index in range(len(rows))],
            "data_source": ["builtin/arithmetic"] * len(rows),
            "reward_model": [{"ground_truth": truth} for truth in truths or responses],
            "extra_info": [{"index": index} for index in range(len(rows))],
        },
    )


def test_the_score_stands_on_the_last_valid_token_and_nowhere_else():
    batch = make_batch(["82", "7", "12345"], truths=["82", "8", "12345"])
    output = NaiveRewardManager(TOKENIZER, default_compute_score)(batch)
    assert output.reward_tensor.dtype == torch.float32
    assert output.reward_tensor.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert output.responses == ["82", "7", "12345"]
    assert output.extra_info == {}


def test_an_empty_response_is_scored_but_has_no_token_to_carry_it():
    seen = []
    output = NaiveRewardManager(TOKENIZER, lambda **sample: seen.append(sample["solution_str"]) or 1.0)(
        make_batch(["", "8"])
    )
    assert seen == ["", "8"]
    assert output.reward_tensor.tolist() == [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]


def test_further_entries_of_a_dict_are_kept_per_sample():
    def compute_score(*, solution_str, extra_info, **_):
        return {"score": 0.5, "length": len(solution_str)} | ({"first": True} if extra_info["index"] == 0 else {})

    output = NaiveRewardManager(TOKENIZER, compute_score)(make_batch(["1", "22"]))
    assert output.extra_info == {"length": [1, 2], "first": [True, None]}
    assert output.reward_tensor.sum(-1).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("score", [1, True, torch.tensor(0.25), 0.25])
def test_any_finite_number_is_a_score(score):
    output = NaiveRewardManager(TOKENIZER, lambda **_: score)(make_batch(["1"]))
    assert output.reward_tensor.sum().item() == float(score)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "1.0", {"points": 1.0}, {"score": float("nan")}])
def test_a_result_that_is_no_finite_number_names_the_sample(score):
    manager = NaiveRewardManager(TOKENIZER, lambda *, extra_info, **_: score if extra_info["index"] == 1 else 0.0)
    expected = r"sample 1 \(uid uid-1, data_source builtin/arithmetic, response '22'\)"
    with pytest.raises(RewardError, match=expected):
        manager(make_batch(["1", "22"]))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_reward_function_that_raises_names_the_sample_and_is_the_cause(num_workers):
    def compute_score(*, solution_str, **_):
        return 1 / (len(solution_str) - 2)

    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: .* on sample 1 \(uid uid-1.*'22'") as info:
        NaiveRewardManager(TOKENIZER, compute_score, num_workers)(make_batch(["1", "22", "333"]))
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_a_data_source_without_a_rule_is_the_users_to_fix():
    batch = make_batch(["1"])
    batch.non_tensor_batch["data_source"][0] = "my/data"
    with pytest.raises(ConfigError, match="my/data"):
        NaiveRewardManager(TOKENIZER, default_compute_score)(batch)


def test_threads_score_at_once_and_keep_the_order():
    together = threading.Barrier(3, timeout=10)

    def compute_score(*, solution_str, **_):
        together.wait()
        return float(solution_str)

    output = NaiveRewardManager(TOKENIZER, compute_score, num_workers=3)(make_batch(["3", "1", "2"]))
    assert output.reward_tensor.sum(-1).tolist() == [3.0, 1.0, 2.0]
