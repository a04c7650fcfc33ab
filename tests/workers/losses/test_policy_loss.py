import math

import pytest
import torch

from verl.utils.config import ConfigError
from verl.workers.config import ActorConfig
from verl.workers.losses import compute_policy_loss_vanilla, get_policy_loss_fn, register_policy_loss


def one_token(ratio, advantage, *, weight=None, **options):
    """Loss and metrics of a single token whose probability changed by `ratio`, and d loss / d log_prob."""
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = compute_policy_loss_vanilla(
        torch.zeros(1, 1),
        log_prob,
        torch.tensor([[advantage]]),
        torch.ones(1, 1),
        config=ActorConfig(**options),
        rollout_is_weights=None if weight is None else torch.tensor([[weight]]),
    )
    loss.backward()
    return loss.item(), metrics, log_prob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "clipped_lower", "has_gradient"),
    [
        (1.0, 2.0, -2.0, 0, 0, True),
        (1.1, 2.0, -2.2, 0, 0, True),  # inside the range
        (1.5, 2.0, -1.2 * 2, 1, 0, False),  # no more to gain above 1 + high
        (0.5, 2.0, -0.5 * 2, 0, 0, True),  # worse than before: the pessimistic side is not clipped
        (0.5, -2.0, 0.8 * 2, 1, 0, False),  # no more to gain below 1 - low
        (1.5, -2.0, 1.5 * 2, 0, 0, True),
        (5.0, -2.0, 3.0 * 2, 0, 1, False),  # the dual clip holds at c = 3
        (5.0, 2.0, -1.2 * 2, 1, 0, False),  # which does not touch positive advantages
    ],
)
def test_the_loss_of_one_token(ratio, advantage, loss, clipped, clipped_lower, has_gradient):
    got, metrics, gradient = one_token(ratio, advantage)
    assert got == pytest.approx(loss)
    assert metrics["actor/pg_clipfrac"] == clipped
    assert metrics["actor/pg_clipfrac_lower"] == clipped_lower
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio), abs=1e-6)
    # Where it flows, d/dlogp of -A r is -A r.
    assert gradient == pytest.approx(-advantage * ratio if has_gradient else 0.0)


def test_the_two_sides_of_the_clip_range_are_set_apart():
    assert one_token(1.5, 1.0, clip_ratio_high=0.4)[0] == pytest.approx(-1.4)
    assert one_token(0.1, -1.0, clip_ratio_low=0.7, clip_ratio_high=0.4)[0] == pytest.approx(0.3)


def test_rollout_weights_multiply_the_token_loss():
    assert one_token(1.1, 2.0, weight=0.25)[0] == pytest.approx(-0.55)


@pytest.mark.parametrize("padding", [1e4, -1e4, float("nan"), float("inf")])
def test_what_stands_on_padding_matters_neither_to_the_loss_nor_to_the_gradient(padding):
    mask = torch.tensor([[1, 0]])
    log_prob = torch.tensor([[0.1, padding]], requires_grad=True)
    loss, metrics = compute_policy_loss_vanilla(
        torch.tensor([[0.0, 0.0]]), log_prob, torch.tensor([[1.0, float("nan")]]), mask, config=ActorConfig()
    )
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.1))
    assert log_prob.grad.tolist() == [[pytest.approx(-math.exp(0.1)), 0.0]]
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.1)


def test_an_unknown_loss_is_named_with_the_nearest_known_one():
    assert get_policy_loss_fn("vanilla") is compute_policy_loss_vanilla
    with pytest.raises(ConfigError, match=r"actor.policy_loss.loss_mode='vanila'.*Did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


def test_a_loss_with_another_signature_is_an_error_of_the_configuration():
    register_policy_loss("old_style")(lambda old_log_prob, log_prob, advantages, eos_mask, cliprange: None)
    with pytest.raises(
        ConfigError, match=r"loss_mode=old_style: .*cannot take \(old_log_prob, .*, rollout_is_weights\)"
    ):
        get_policy_loss_fn("old_style")
