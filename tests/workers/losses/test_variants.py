"""Losses of papers, against values that were computed by hand from their formulas."""

import math

import pytest
import torch

from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.losses import LossTotals, get_policy_loss_fn

MASK = torch.tensor([[1, 1], [1, 0]])
RATIOS = torch.tensor([[2.0, 0.5], [1.5, 9.0]])  # the last one stands on padding
ADVANTAGES = torch.tensor([[1.0, 1.0], [-2.0, -2.0]])


def loss_of(name, *, ratios=RATIOS, advantages=ADVANTAGES, mask=MASK, old=0.0, weights=None, totals=None, **options):
    """Loss, metrics, and d loss / d log_prob."""
    old_log_prob = torch.full_like(ratios, old)
    log_prob = (old_log_prob + ratios.log()).requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=ActorConfig(**options).loss_agg_mode,
        config=ActorConfig(**options),
        rollout_is_weights=weights,
        totals=totals,
    )
    loss.backward()
    return loss.item(), metrics, log_prob.grad


def test_gspo_clips_the_geometric_mean_of_a_sequence():
    # Sequence 0: sqrt(2 * 0.5) = 1, unclipped: -1. Sequence 1: 1.5 with A = -2: 3, not clipped on that side.
    loss, metrics, gradient = loss_of("gspo", loss_agg_mode="seq-mean-token-mean")
    assert loss == pytest.approx((-1.0 + 3.0) / 2)
    assert metrics["actor/pg_clipfrac"] == 0
    # The gradient of a token is -A s, over the tokens of its sequence and the sequences.
    assert torch.allclose(gradient, torch.tensor([[-0.25, -0.25], [1.5, 0.0]]))


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.1, 1.0, -1.0004), (0.9, -1.0, 0.9997)])
def test_gspo_has_no_more_to_gain_beyond_its_range(ratio, advantage, expected):
    loss, metrics, gradient = loss_of(
        "gspo",
        ratios=torch.full((1, 2), ratio),
        advantages=torch.full((1, 2), advantage),
        mask=torch.ones(1, 2),
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
    )
    assert loss == pytest.approx(expected)
    assert metrics["actor/pg_clipfrac"] == 1
    assert not gradient.any()


def test_gmpo_clips_log_ratios_of_tokens_before_their_mean():
    # Sequence 0, A = 1: log 2 is clipped to 0.4, log 0.5 is not: exp((0.4 - log 2) / 2). Sequence 1, A = -2: 1.5.
    loss, metrics, _ = loss_of("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    assert loss == pytest.approx((-math.exp((0.4 - math.log(2)) / 2) + 2 * 1.5) / 2)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 3)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 3)


def test_gpg_is_the_plain_policy_gradient():
    loss, metrics, gradient = loss_of("gpg", old=-1.0)
    expected = -(math.log(2) - 1) - (math.log(0.5) - 1) + 2 * (math.log(1.5) - 1)
    assert loss == pytest.approx(expected / 3)
    assert metrics == {}
    assert torch.allclose(gradient, torch.tensor([[-1.0, -1.0], [2.0, 0.0]]) / 3)


def test_sapo_gates_each_sign_at_its_own_temperature():
    def gate(ratio, tau):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    loss, _, gradient = loss_of("sapo", policy_loss=PolicyLossConfig(tau_pos=1.0, tau_neg=2.0))
    assert loss == pytest.approx((-(gate(2, 1) + gate(0.5, 1)) / 2 + 2 * gate(1.5, 2)) / 2)
    # On the policy of the rollouts the gradient is that of the policy gradient: d gate / d log pi = 1 at r = 1.
    _, _, on_policy = loss_of("sapo", ratios=torch.ones(1, 1), advantages=torch.ones(1, 1), mask=torch.ones(1, 1))
    assert on_policy.item() == pytest.approx(-1.0)
    assert gradient[1, 1] == 0


def test_cispo_weighs_every_token_with_its_clipped_ratio():
    loss, metrics, gradient = loss_of("cispo", old=-1.0, clip_ratio_low=0.2, clip_ratio_high=0.2)
    log = [math.log(2) - 1, math.log(0.5) - 1, math.log(1.5) - 1]
    assert loss == pytest.approx((-1.2 * log[0] - 0.8 * log[1] + 2 * 1.2 * log[2]) / 3)
    assert metrics["actor/pg_clipfrac"] == 1
    # Also clipped tokens have a gradient: their weight.
    assert torch.allclose(gradient, torch.tensor([[-1.2, -0.8], [2.4, 0.0]]) / 3)


@pytest.mark.parametrize("name", ["gspo", "geo_mean", "gpg", "sapo", "cispo"])
def test_the_loss_of_a_mini_batch_is_the_sum_of_its_micro_batches(name):
    totals = LossTotals.of(MASK)
    whole, metrics, gradient = loss_of(name)
    parts = [
        loss_of(name, ratios=RATIOS[row], advantages=ADVANTAGES[row], mask=MASK[row], totals=totals)
        for row in (slice(0, 1), slice(1, 2))
    ]
    assert sum(part[0] for part in parts) == pytest.approx(whole)
    assert torch.allclose(torch.cat([part[2] for part in parts]), gradient)
    for metric, value in metrics.items():
        assert sum(part[1][metric] for part in parts) == pytest.approx(value)


@pytest.mark.parametrize("name", ["gspo", "geo_mean", "gpg", "sapo", "cispo"])
def test_rollout_weights_multiply_the_token_losses(name):
    assert loss_of(name, weights=torch.full((2, 2), 0.5))[0] == pytest.approx(0.5 * loss_of(name)[0])


# A token of probability 0.5 and its ratios; the covariances are (A - 0) (log pi - mean).
BOLD = {
    "ratios": torch.tensor([[1.1, 1.1, 0.9, 0.9]]),
    "advantages": torch.tensor([[1.0, -1.0, 1.0, -1.0]]),
    "mask": torch.ones(1, 4),
    "old": math.log(0.5),
}


def test_clip_cov_leaves_out_tokens_whose_covariance_lies_between_the_bounds():
    # Log-probs differ from their mean by half of log(1.1 / 0.9), 0.1; that is the first and the last one's covariance.
    chosen = PolicyLossConfig(clip_cov_lb=0.05, clip_cov_ub=0.15, clip_cov_ratio=1.0)
    loss, metrics, gradient = loss_of("clip_cov", policy_loss=chosen, **BOLD)
    assert loss == pytest.approx((1.1 - 0.9) / 4)
    assert torch.allclose(gradient, torch.tensor([[0.0, 1.1, -0.9, 0.0]]) / 4)
    assert metrics["actor/pg_clipfrac"] == 0.5


def test_clip_cov_leaves_out_one_at_least_and_otherwise_is_ppo():
    chosen = PolicyLossConfig(clip_cov_lb=0.05, clip_cov_ub=0.15)
    _, metrics, _ = loss_of("clip_cov", policy_loss=chosen, **BOLD)
    assert metrics["actor/pg_clipfrac"] == 0.25
    clipped = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
    assert loss_of("clip_cov", **clipped, **BOLD)[0] == pytest.approx(loss_of("vanilla", **clipped, **BOLD)[0])


def test_kl_cov_penalises_the_tokens_of_highest_covariance():
    chosen = PolicyLossConfig(kl_cov_ratio=0.5, ppo_kl_coef=2.0)
    loss, metrics, gradient = loss_of("kl_cov", policy_loss=chosen, **BOLD)
    assert loss == pytest.approx((-1.1 + 1.1 - 0.9 + 0.9 + 2 * (math.log(1.1) - math.log(0.9))) / 4)
    assert torch.allclose(gradient, torch.tensor([[-1.1 + 2, 1.1, -0.9, 0.9 - 2]]) / 4)
    assert metrics["actor/kl_cov_frac"] == 0.5


def test_kl_cov_does_not_count_padding():
    given = {**BOLD, "mask": torch.tensor([[0.0, 1.0, 1.0, 0.0]])}
    _, metrics, _ = loss_of("kl_cov", policy_loss=PolicyLossConfig(kl_cov_ratio=1.0), **given)
    assert metrics["actor/kl_cov_frac"] == 1.0


def binary_kl(before, now):
    return before * math.log(before / now) + (1 - before) * math.log((1 - before) / (1 - now))


@pytest.mark.parametrize(
    ("name", "threshold"), [("dppo_tv", 0.049), ("dppo_kl", 0.9 * binary_kl(0.5, 0.55))], ids=["tv", "kl"]
)
def test_dppo_stops_tokens_beyond_the_divergence_that_move_on(name, threshold):
    # 0.5 became 0.55 or 0.45: a total variation of 0.05. Up with A > 0 and down with A < 0 would move on.
    loss, metrics, gradient = loss_of(name, clip_ratio_low=threshold, clip_ratio_high=threshold, **BOLD)
    assert loss == pytest.approx((1.1 * math.log(0.55) - 0.9 * math.log(0.45)) / 4, abs=1e-6)
    assert torch.allclose(gradient, torch.tensor([[0.0, 1.1, -0.9, 0.0]]) / 4)
    assert (metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("name", "threshold"), [("dppo_tv", 0.051), ("dppo_kl", 1.1 * binary_kl(0.5, 0.55))], ids=["tv", "kl"]
)
def test_dppo_does_not_mind_the_ratio_of_what_is_unlikely(name, threshold):
    loss, metrics, _ = loss_of(name, clip_ratio_low=threshold, clip_ratio_high=threshold, **BOLD)
    assert loss == pytest.approx(0.0, abs=1e-7)
    assert metrics["actor/pg_clipfrac"] == 0
    rare = {**BOLD, "ratios": torch.tensor([[2.0, 0.5, 1.0, 1.0]]), "old": math.log(1e-3)}
    assert loss_of(name, clip_ratio_low=threshold, clip_ratio_high=threshold, **rare)[1]["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_dppo_weighs_a_token_with_a_ratio_of_clip_ratio_c_at_most(name, advantage):
    far = {"ratios": torch.tensor([[10.0]]), "advantages": torch.tensor([[advantage]]), "mask": torch.ones(1, 1)}
    loss, _, gradient = loss_of(name, old=math.log(1e-3), clip_ratio_c=3.0, **far)
    assert gradient.item() == pytest.approx(-3.0 * advantage)
    assert loss == pytest.approx(-3.0 * advantage * math.log(1e-2))


def test_gspo_follows_the_aggregation_that_is_configured():
    # Tokens of the three: -1, -1 and 3.
    assert loss_of("gspo", loss_agg_mode="token-mean")[0] == pytest.approx((-1 - 1 + 3) / 3)
    assert loss_of("gspo", loss_agg_mode="seq-mean-token-sum")[0] == pytest.approx((-2 + 3) / 2)


def test_gmpo_weighs_a_sequence_with_the_geometric_mean_of_its_tokens_weights():
    weights = torch.tensor([[4.0, 1.0], [1.0, 7.0]])
    first, second = -1.0, 2 * 1.5
    clip = {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0}
    assert loss_of("geo_mean", weights=weights, **clip)[0] == pytest.approx((2.0 * first + second) / 2)


def test_the_divergence_that_kl_cov_reports_has_no_sign():
    _, metrics, _ = loss_of("kl_cov", **BOLD)
    assert metrics["actor/ppo_kl"] == pytest.approx((math.log(1.1) - math.log(0.9)) / 2)
