"""Per-token estimates of the KL divergence from the reference policy."""

from __future__ import annotations

import torch

from verl.utils.config import ConfigError, did_you_mean

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before `exp`: e^20 is far beyond any trust region and far from overflow."""
MAX_LOW_VAR_KL = 10.0


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """KL(policy || reference) per token, estimated from the one sampled token: [B, R], [B, R] -> [B, R].

    J. Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html), with d = logprob - ref_logprob:

    * `kl` (k1): d. Unbiased, can be negative. Its gradient is zero in expectation: for the reward, not for the loss.
    * `abs`: |d|.
    * `mse` (k2): d^2 / 2.
    * `low_var_kl` (k3): exp(-d) + d - 1. Unbiased and never negative; clamped to at most 10, so that one token that
      the policy has nearly forgotten cannot decide the step.

    With a `+` behind the name the value is that, and the gradient that of `mse`, which is the gradient of the KL
    divergence in expectation (Y. Tang and R. Munos, "On a few pitfalls in KL divergence gradient estimation for RL",
    arXiv:2506.09477).

    `k1`, `k2` and `k3` are other names of `kl`, `mse` and `low_var_kl`. Raises ConfigError for another name.
    """
    difference = logprob - ref_logprob
    if kl_penalty.endswith("+"):
        of_gradient = 0.5 * difference.square()
        value = _estimate(difference.detach(), kl_penalty.removesuffix("+"))
        return value + of_gradient - of_gradient.detach()
    return _estimate(difference, kl_penalty)


def _estimate(difference: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    if kl_penalty in ("kl", "k1"):
        return difference
    if kl_penalty == "abs":
        return difference.abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * difference.square()
    if kl_penalty in ("low_var_kl", "k3"):
        log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (log_ratio.exp() - log_ratio - 1.0).clamp(max=MAX_LOW_VAR_KL)
    known = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
    raise ConfigError(f"KL estimator {kl_penalty!r} is not known.{did_you_mean(kl_penalty, known)}")
