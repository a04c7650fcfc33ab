"""The KL penalty in the reward, and the controllers of its coefficient. All of it runs on the driver."""

from __future__ import annotations

import torch

from verl.utils.torch_functional import masked_mean
from verl.workers.config import KLControlConfig
from verl.workers.losses import kl_penalty as estimate_kl


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change nothing."""


class AdaptiveKLController:
    """A coefficient that grows while the KL is above `target_kl` and shrinks while it is below.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, section 2.2. `value` is all
    of its state: save it with a checkpoint and set it on resume.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        self.value = init_kl_coef
        self._target = target_kl
        self._horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """`current_kl` was the mean over `n_steps` sequences."""
        proportional_error = min(max(current_kl / self._target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + proportional_error * n_steps / self._horizon


KLController = FixedKLController | AdaptiveKLController


def get_kl_controller(kl_ctrl: KLControlConfig) -> KLController:
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    return FixedKLController(kl_ctrl.kl_coef)


def apply_kl_penalty(
    token_level_scores: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    kl_ctrl: KLController,
    kl_penalty: str,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Scores minus the coefficient times the KL estimate of each token: all [B, R] -> (token_level_rewards, metrics).

    Then updates `kl_ctrl` with this batch's KL, the mean over sequences of their mean over tokens.
    """
    mask = response_mask.bool()
    token_kl = torch.where(mask, estimate_kl(old_log_probs, ref_log_prob, kl_penalty), 0.0)
    coefficient = kl_ctrl.value
    generated = mask.any(-1)
    current_kl = masked_mean(masked_mean(token_kl, mask, axis=-1), generated).item()
    kl_ctrl.update(current_kl, n_steps=int(generated.sum()))
    metrics = {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": coefficient}
    return token_level_scores - coefficient * token_kl, metrics
