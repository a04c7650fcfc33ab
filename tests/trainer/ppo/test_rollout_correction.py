import math

import pytest
import torch

from verl.trainer.ppo.core_algos import compute_rollout_importance_weights, rollout_probs_diff_metrics
from verl.workers.config import RolloutCorrectionConfig

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
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(4.0)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(16 / (3 * (2.25 + 4 + 0.25)))


def test_sequence_weights_are_truncated_products_over_the_sequence():
    torch.testing.assert_close(weights("sequence", threshold=10.0)[0], torch.tensor([[6.0, 6.0], [0.5, 0.0]]))
    got, metrics = weights("sequence", threshold=5.0)
    torch.testing.assert_close(got, torch.tensor([[5.0, 5.0], [0.5, 0.0]]))
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(6.0)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(2.75)


def test_without_correction_there_are_no_weights_but_the_divergence_is_reported():
    got, metrics = weights(None)
    assert got is None
    assert metrics["rollout_corr/kl"] == pytest.approx(-(math.log(1.5) + math.log(4) + math.log(0.5)) / 3)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((1.5 + 4 + 0.5 - math.log(3)) / 3 - 1)


def test_weights_carry_no_gradient():
    assert not weights("token", trainer=TRAINER.clone().requires_grad_())[0].requires_grad


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
    assert rollout_probs_diff_metrics(TRAINER, ROLLOUT, nothing) == {}
    got, metrics = compute_rollout_importance_weights(
        TRAINER, ROLLOUT, nothing, RolloutCorrectionConfig(rollout_is="token")
    )
    assert not got.any()
    assert metrics == {}
