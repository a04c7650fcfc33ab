import math

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_rollout_importance_weights, rejected, rollout_probs_diff_metrics
from verl.trainer.ppo.experience import Experience
from verl.trainer.ppo.step import Step
from verl.utils.config import ConfigError, from_mapping
from verl.utils.timing import Patience
from verl.workers.config import PPOConfig, RolloutCorrectionConfig
from verl.workers.losses.correction import KEPT, kept_tokens

# Ratios trainer / rollout: 1.5, 4.0 | 0.5, (padding).
TRAINER = torch.tensor([[0.6, 0.8], [0.2, 0.9]]).log()
ROLLOUT = torch.tensor([[0.4, 0.2], [0.4, 1e-9]]).log()
MASK = torch.tensor([[1, 1], [1, 0]])


def weights(level, threshold=2.0, trainer=TRAINER):
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=threshold)
    return compute_rollout_importance_weights(trainer, ROLLOUT, MASK, config)


def test_token_weights_are_truncated_ratios_of_each_token():
    got, metrics = weights("token")
    torch.testing.assert_close(got, torch.tensor([[1.5, 2.0], [0.5, 0.0]]))
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(4 / 3)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)  # as truncated
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(16 / (3 * (2.25 + 4 + 0.25)))


def test_sequence_weights_are_truncated_products_over_the_sequence():
    torch.testing.assert_close(weights("sequence", threshold=10.0)[0], torch.tensor([[6.0, 6.0], [0.5, 0.0]]))
    got, metrics = weights("sequence", threshold=5.0)
    torch.testing.assert_close(got, torch.tensor([[5.0, 5.0], [0.5, 0.0]]))
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(6.0)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((5 + 5 + 0.5) / 3)
    assert metrics["rollout_corr/rollout_is_seq_mean"] == pytest.approx(2.75)


def test_without_correction_there_are_no_weights_but_the_divergence_is_reported():
    got, metrics = weights(None)
    assert got is None
    assert metrics["rollout_corr/kl"] == pytest.approx(-(math.log(1.5) + math.log(4) + math.log(0.5)) / 3)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((1.5 + 4 + 0.5 - math.log(3)) / 3 - 1)


def test_weights_carry_no_gradient():
    assert not weights("token", trainer=TRAINER.clone().requires_grad_())[0].requires_grad


def test_with_two_bounds_weights_outside_of_them_are_zero():
    got, metrics = weights("token", threshold="0.6_2.0")
    torch.testing.assert_close(got, torch.tensor([[1.5, 0.0], [0.0, 0.0]]))
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)


def test_normalised_weights_have_mean_one():
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True)
    got, _ = compute_rollout_importance_weights(TRAINER, ROLLOUT, MASK, config)
    torch.testing.assert_close(got, torch.tensor([[1.5, 2.0], [0.5, 0.0]]) * 3 / 4)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True, rollout_is_threshold=5.0)
    got, _ = compute_rollout_importance_weights(TRAINER, ROLLOUT, MASK, config)
    torch.testing.assert_close(got, torch.tensor([[5.0, 5.0], [0.5, 0.0]]) / 2.75)  # over sequences


# log 1.5 = 0.41, log 4 = 1.39 | log 0.5 = -0.69. k2: 0.08, 0.96 | 0.24. k3 = r - 1 - log r: 0.09, 1.61 | 0.19.
# Sums: 1.79 = log 6, 1.04, 1.71 | as they are. Means over tokens: log sqrt(6) = log 2.45, 0.52, 0.85.
REJECTED = {
    ("token_k1", "0.5_1.666667"): [[1, 0], [0, 0]],
    ("token_k1", 2.1): [[1, 0], [1, 0]],  # the lower bound is its inverse
    ("token_k2", 0.1): [[1, 0], [0, 0]],
    ("token_k3", 0.2): [[1, 0], [1, 0]],
    ("seq_sum_k1", "0.169492_2.5"): [[0, 0], [1, 0]],
    ("seq_sum_k1", "0.163934_1.666667"): [[1, 1], [0, 0]],
    ("seq_sum_k2", 1.1): [[1, 1], [1, 0]],
    ("seq_sum_k2", 1.0): [[0, 0], [1, 0]],
    ("seq_sum_k3", 1.6): [[0, 0], [1, 0]],
    ("seq_mean_k1", "0.416667_2.5"): [[0, 0], [1, 0]],
    ("seq_mean_k1", "0.4_2.5"): [[1, 1], [1, 0]],
    ("seq_mean_k2", 0.5): [[0, 0], [1, 0]],
    ("seq_mean_k3", 0.84): [[0, 0], [1, 0]],
    ("seq_mean_k3", 0.86): [[1, 1], [1, 0]],
    ("seq_max_k2", 0.95): [[0, 0], [1, 0]],
    ("seq_max_k3", 1.62): [[1, 1], [1, 0]],
    ("token_k1,seq_mean_k1", "0.2_1.666667,0.416667_2.5"): [[0, 0], [0, 0]],
}


@pytest.mark.parametrize(("given", "expected"), REJECTED.items(), ids=str)
def test_rejection_keeps_what_is_within_the_bounds(given, expected):
    config = RolloutCorrectionConfig(rollout_rs=given[0], rollout_rs_threshold=given[1])
    kept, metrics = rejected(TRAINER, ROLLOUT, MASK, config)
    assert kept.tolist() == expected
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - sum(map(sum, expected)) / 3)
    changed = [row != before for row, before in zip(expected, MASK.tolist(), strict=True)]
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(sum(changed) / 2)


def test_one_token_far_below_vetoes_its_sequence():
    kept, _ = rejected(TRAINER, ROLLOUT, MASK, RolloutCorrectionConfig(rollout_token_veto_threshold=0.6))
    assert kept.tolist() == [[1, 1], [0, 0]]


def test_without_rejection_the_mask_is_as_it_was():
    assert rejected(TRAINER, ROLLOUT, MASK, RolloutCorrectionConfig()) == (MASK, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_rs": "seq_mean_k4", "rollout_rs_threshold": 2.0}, "'seq_mean_k4' is none of"),
        ({"rollout_rs": "seq_mean_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs_threshold": 2.0}, "needs rollout_rs"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "0 < lower < upper"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"}, "0 < lower < upper"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "one divergence above 0"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2,2,2"}, "3 bounds for 2"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "much"}, "write a number, or two"),
        ({"rollout_is_threshold": "0.5_inf"}, "must be finite"),
    ],
    ids=str,
)
def test_bounds_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RolloutCorrectionConfig(**options)


def test_the_gap_between_the_policies_is_reported_per_token_and_per_sequence():
    _, metrics = weights(None)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((1.5**2 + 4**2 + 0.5**2) / 3 - 1)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx((36 + 0.25) / 2 - 1)
    assert metrics["rollout_corr/training_ppl"] == pytest.approx((0.48**-0.5 + 5) / 2)
    assert metrics["rollout_corr/rollout_ppl"] == pytest.approx((0.08**-0.5 + 2.5) / 2)
    differences = [math.log(6) / 2, math.log(0.5)]
    assert metrics["rollout_corr/log_ppl_diff"] == pytest.approx(-sum(differences) / 2)
    assert metrics["rollout_corr/log_ppl_diff_max"] == pytest.approx(max(-value for value in differences))
    assert metrics["rollout_corr/ppl_ratio"] == pytest.approx(sum(math.exp(-value) for value in differences) / 2)


def test_probability_differences_count_generated_tokens_only():
    got = rollout_probs_diff_metrics(TRAINER, ROLLOUT, MASK)
    # |0.6-0.4|, |0.8-0.2|, |0.2-0.4|
    assert got["training/rollout_probs_diff_mean"] == pytest.approx(1 / 3)
    assert got["training/rollout_probs_diff_max"] == pytest.approx(0.6)
    assert got["training/rollout_probs_diff_std"] == pytest.approx((2 * (2 / 15) ** 2 / 3 + (4 / 15) ** 2 / 3) ** 0.5)
    expected = torch.corrcoef(torch.tensor([[0.6, 0.8, 0.2], [0.4, 0.2, 0.4]]))[0, 1].item()
    assert got["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("trainer", "rollout", "expected"), [(0.3, 0.3, 1.0), (0.3, 0.4, 0.0)])
def test_the_correlation_of_constants_is_one_if_they_agree_and_else_zero(trainer, rollout, expected):
    shape = (2, 7)
    got = rollout_probs_diff_metrics(
        torch.full(shape, trainer).log(), torch.full(shape, rollout).log(), torch.ones(shape)
    )
    assert got["training/rollout_actor_probs_pearson_corr"] == expected


def test_a_batch_without_generated_tokens_has_no_metrics():
    nothing = torch.zeros_like(MASK)
    assert rollout_probs_diff_metrics(TRAINER, ROLLOUT, nothing) == {"training/rollout_probs_diff_valid": 0.0}
    got, metrics = compute_rollout_importance_weights(
        TRAINER, ROLLOUT, nothing, RolloutCorrectionConfig(rollout_is="token")
    )
    assert not got.any()
    assert metrics == {}


def test_k1_is_bounded_as_in_verl_from_the_side_of_the_rollout() -> None:
    """verl 0.9.1, run with these ratios, keeps the first sequence and rejects the second."""
    trainer_over_rollout = torch.tensor([[1.005, 1.005], [0.995, 0.995]])
    config = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.99_1.001")
    kept = kept_tokens(trainer_over_rollout.log(), torch.ones(2, 2, dtype=torch.bool), config)
    assert kept.tolist() == [[True, True], [False, False]]


def test_what_is_rejected_before_the_update_is_still_counted():
    given = {"algorithm": {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.3_1.9"}}}
    experience = Experience(from_mapping(PPOConfig, given), None, None, None, None)
    tensors = {"old_log_probs": TRAINER, "rollout_log_probs": ROLLOUT, "response_mask": MASK}
    batch = DataProto.from_dict(
        tensors | {"token_level_scores": torch.ones(2, 2)}, {"uid": np.array(["a", "a"], dtype=object)}
    )
    now = Step(1, Patience())
    learned = experience.add_advantages(batch, now)
    assert learned.batch["response_mask"].tolist() == MASK.tolist()
    assert learned.batch[KEPT].tolist() == [[1, 0], [0, 0]]
    assert now.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
