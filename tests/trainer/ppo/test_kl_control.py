import pytest
import torch

from verl.trainer.ppo.core_algos import AdaptiveKLController, FixedKLController, apply_kl_penalty, get_kl_controller
from verl.workers.config import KLControlConfig


def test_the_configuration_selects_the_controller():
    assert isinstance(get_kl_controller(KLControlConfig()), FixedKLController)
    adaptive = get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.2))
    assert isinstance(adaptive, AdaptiveKLController)
    assert adaptive.value == 0.2


@pytest.mark.parametrize(
    ("current_kl", "expected"),
    [(0.1, 0.5), (0.11, 0.5 * (1 + 0.1 * 0.01)), (9.0, 0.5 * (1 + 0.2 * 0.01)), (0.0, 0.5 * (1 - 0.2 * 0.01))],
)
def test_the_adaptive_coefficient_moves_towards_the_target_in_bounded_steps(current_kl, expected):
    controller = AdaptiveKLController(0.5, target_kl=0.1, horizon=1000)
    controller.update(current_kl, n_steps=10)
    assert controller.value == pytest.approx(expected)


def test_the_penalty_is_subtracted_from_every_token_and_reported_as_a_mean_over_sequences():
    scores = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    old = torch.tensor([[-1.0, -1.0], [-1.0, float("nan")], [5.0, 5.0]])
    reference = torch.tensor([[-2.0, -4.0], [-1.5, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    controller = AdaptiveKLController(0.1, target_kl=1.0, horizon=10)
    rewards, metrics = apply_kl_penalty(scores, old, reference, mask, kl_ctrl=controller, kl_penalty="kl")
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.7], [1.95, 0.0], [0.0, 0.0]]))
    # Sequence means 2.0 and 0.5; the third sequence has no token.
    assert metrics == {"actor/reward_kl_penalty": pytest.approx(1.25), "actor/reward_kl_penalty_coeff": 0.1}
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
