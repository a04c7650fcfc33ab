import numpy as np
import pytest
import torch

from verl import DataProto
from verl.trainer.ppo.metric_utils import (
    _majority,
    compute_data_metrics,
    compute_staleness_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    process_validation_metrics,
    validation_names,
)
from verl.workers.rollout.records import NO_VERSION


@pytest.fixture
def batch():
    """Three sequences, P = 2, R = 3: one with a tool's output in the middle and full, one short, one aborted."""
    return DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(3, 2, dtype=torch.int64),
            "responses": torch.zeros(3, 3, dtype=torch.int64),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0], [9.0, 0.0, 0.0]]),
            "token_level_rewards": torch.tensor([[0.0, 0.0, 0.8], [0.4, 0.0, 0.0], [9.0, 0.0, 0.0]]),
            "advantages": torch.tensor([[2.0, 9.0, 2.0], [-1.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
            "returns": torch.tensor([[1.0, 9.0, 1.0], [1.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
        },
        non_tensors={"__num_turns__": [4, 2, 0]},
    )


def test_a_batch_is_described_by_hand_computed_numbers(batch):
    assert compute_data_metrics(batch) == pytest.approx(
        {
            "critic/score/mean": 0.75,
            "critic/score/max": 1.0,
            "critic/score/min": 0.5,
            "critic/rewards/mean": 0.6,
            "critic/rewards/max": 0.8,
            "critic/rewards/min": 0.4,
            "critic/advantages/mean": 1.0,
            "critic/advantages/max": 2.0,
            "critic/advantages/min": -1.0,
            "critic/returns/mean": 1.0,
            "critic/returns/max": 1.0,
            "critic/returns/min": 1.0,
            "response_length/mean": 4 / 3,
            "response_length/max": 3.0,
            "response_length/min": 0.0,
            "response_length/clip_ratio": 1 / 3,
            "response_length_non_aborted/mean": 2.0,
            "response_length_non_aborted/max": 3.0,
            "response_length_non_aborted/min": 1.0,
            "response_length_non_aborted/clip_ratio": 0.5,
            "prompt_length/mean": 4 / 3,
            "prompt_length/max": 2.0,
            "prompt_length/min": 1.0,
            "prompt_length/clip_ratio": 1 / 3,
            "response/aborted_ratio": 1 / 3,
            "num_turns/mean": 2.0,
            "num_turns/max": 4.0,
            "num_turns/min": 0.0,
        }
    )


def test_groups_without_a_difference_are_counted(batch):
    rows = {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.7, 0.7, 0.7], "d": [2.0]}
    scores = [score for group in rows.values() for score in group]
    alone = torch.zeros(len(scores), 1)
    batch = DataProto.from_dict(
        {
            "prompts": alone,
            "responses": alone,
            "attention_mask": torch.ones(len(scores), 2),
            "response_mask": torch.ones(len(scores), 1),
            "token_level_scores": torch.tensor(scores)[:, None],
        },
        non_tensors={"uid": np.array([uid for uid, group in rows.items() for _ in group], dtype=object)},
    )
    metrics = compute_data_metrics(batch)
    assert metrics["critic/frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert metrics["critic/reward_std"] == pytest.approx(0.5**0.5 / 3)
    assert "critic/reward_std" not in compute_data_metrics(batch[6:])


def test_a_batch_in_which_everything_was_aborted_has_lengths_only(batch):
    metrics = compute_data_metrics(batch[2:])
    assert metrics["response/aborted_ratio"] == 1.0
    assert not [name for name in metrics if name.startswith("critic/")]


def test_the_explained_variance_is_of_the_tokens_that_the_policy_made(batch):
    batch.batch["returns"] = torch.tensor([[1.0, 9.0, 2.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    batch.batch["values"] = torch.tensor([[1.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    errors, returns = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 4.0])
    explained = 1 - errors.var() / returns.var()
    assert compute_data_metrics(batch)["critic/vf_explained_var"] == pytest.approx(explained.item(), abs=1e-4)


def test_seconds_are_reported_per_phase_and_per_token_of_what_the_phase_works_on(batch):
    metrics = compute_timing_metrics(batch, {"gen": 6.0, "update_actor": 4.0, "testing": 1.0})
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 6.0,
            "timing_s/update_actor": 4.0,
            "timing_s/testing": 1.0,
            "timing_per_token_ms/gen": 1500.0,  # 4 attended tokens of responses
            "timing_per_token_ms/update_actor": 500.0,  # 8 attended tokens
        }
    )


def test_staleness_is_how_many_versions_the_trainer_is_ahead_of_the_one_that_sampled_a_token(batch):
    batch.batch["rollout_versions"] = torch.tensor([[5, NO_VERSION, 6], [4, 0, 0], [0, 0, 0]])
    assert compute_staleness_metrics(batch, trainer_version=6) == {
        "training/staleness/mean": 1.0,
        "training/staleness/max": 2.0,
        "training/staleness/min": 0.0,
    }
    batch.batch["rollout_kv_versions"] = torch.tensor([[5, NO_VERSION, 4], [3, 0, 0], [0, 0, 0]])
    assert compute_staleness_metrics(batch, trainer_version=6) == {
        "rollout/kv_mixed_tokens": 2,
        "training/staleness/mean": 2.0,
        "training/staleness/max": 3.0,
        "training/staleness/min": 1.0,
    }


def test_tokens_of_weights_without_a_version_have_no_staleness(batch):
    assert compute_staleness_metrics(batch, trainer_version=6) == {}
    batch.batch["rollout_versions"] = torch.full((3, 3), NO_VERSION)
    assert compute_staleness_metrics(batch, trainer_version=6) == {}


def test_throughput_is_tokens_per_second_and_rank(batch):
    assert compute_throughput_metrics(batch, {"step": 2.0}, num_ranks=2) == pytest.approx(
        {"perf/total_num_tokens": 8, "perf/time_per_step": 2.0, "perf/throughput": 2.0}
    )


def test_validation_with_several_responses_has_mean_best_and_majority_in_the_core():
    got = validation_names(
        process_validation_metrics(
            ["math"] * 6,
            ["p", "q", "p", "q", "p", "q"],
            {
                "reward": [1.0, 0.0, 0.0, 0.0, 0.0, 1.0],
                "pred": ["7", "3", "8", "3", "8", "4"],
                "seconds": [1, 1, 2, 2, 3, 3],
            },
        )
    )
    core = {name for name in got if name.startswith("val-core")}
    statistics = ["mean@3", *(f"{name}@3/{of}" for name in ("best", "maj") for of in ("mean", "std"))]
    assert core == {f"val-core/math/reward/{statistic}" for statistic in statistics}
    assert got["val-core/math/reward/mean@3"] == pytest.approx(1 / 3)
    assert got["val-aux/math/reward/std@3"] == pytest.approx(2**0.5 / 3)
    assert got["val-core/math/reward/best@3/mean"] > 0.6 > 0.1 > got["val-aux/math/reward/worst@3/mean"]
    assert got["val-aux/math/seconds/mean@3"] == 2.0
    assert got["val-aux/math/seconds/best@2/mean"] < got["val-aux/math/seconds/best@3/mean"]


def test_the_majority_is_the_earliest_of_the_commonest_predictions():
    drawn = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 2], [0, 2, 1], [2, 2, 2]])
    assert _majority(np.array([0, 1, 1]), drawn).tolist() == [0, 1, 1, 2, 2]
    assert _majority(np.array([0, 1, 2]), drawn[:, :2]).tolist() == [0, 1, 0, 0, 2]


def test_data_sources_are_reported_apart_and_prompts_weigh_the_same_whatever_their_name():
    infos = {"reward": [True, False, 0.5], "acc": [1, None, None]}
    got = process_validation_metrics(["a", "a", "b"], ["same uid", "other", "same uid"], infos)
    assert validation_names(got) == {
        "val-aux/a/reward/mean@1": 0.5,
        "val-core/b/reward/mean@1": 0.5,
        "val-core/a/acc/mean@1": 1.0,
    }


def test_validation_results_of_different_length_are_rejected():
    with pytest.raises(ValueError, match="differ in length.*'reward': 1"):
        process_validation_metrics(["a", "a"], ["p", "q"], {"reward": [1.0]})


@pytest.mark.parametrize("number", [np.float32(1), np.array(1), np.bool_(True), torch.tensor(1), True])
def test_numbers_of_every_library_count_in_validation(number):
    metrics = process_validation_metrics(["a"], ["0"], {"reward": [1.0], "right": [number]})
    assert metrics["a"]["right"]["mean@1"] == 1.0


def test_equal_numbers_are_equal_predictions_of_any_type():
    statistics = [
        process_validation_metrics(["a"] * 3, ["0"] * 3, {"reward": [0.0, 1.0, 0.5], "pred": predictions})
        for predictions in (["5", np.int64(3), 3.0], ["5", "3", "3"])
    ]
    assert statistics[0]["a"]["reward"] == statistics[1]["a"]["reward"]
