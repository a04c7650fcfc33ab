"""Divergences of a student from its teacher on the student's own tokens, per token."""

from __future__ import annotations

import torch

from verl.workers.config.distillation import DistillationLossConfig
from verl.workers.losses.kl import kl_penalty

_ESTIMATORS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
"""verl has two names for each."""


def reverse_kl(log_prob: torch.Tensor, teacher_log_prob: torch.Tensor, config: DistillationLossConfig) -> torch.Tensor:
    """KL(student || teacher) per token, [B, R], estimated from the sampled token as `kl_penalty` does.

    `log_prob_min_clamp` is not for it: tokens that both find unlikely would teach nothing.
    On-policy distillation is this, minimised on the student's own samples (K. Lu, "On-Policy Distillation", Thinking
    Machines Lab, 2025).
    """
    estimator = _ESTIMATORS.get(config.loss_mode, config.loss_mode)
    return kl_penalty(log_prob, teacher_log_prob, estimator)


def forward_kl_topk(
    candidate_log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, config: DistillationLossConfig
) -> torch.Tensor:
    """The part of KL(teacher || student) in the teacher's likeliest tokens: [B, R, K], [B, R, K] -> [B, R].

    sum p (log p - log q) over them, as GKD does over all tokens (R. Agarwal et al., arXiv:2306.13649). Without the
    others it is no divergence and may be negative: then it is 0, as in verl, and has no gradient. A teacher's log-prob
    of -inf is no token.
    """
    is_token = teacher_log_probs > float("-inf")
    log_p, log_q = _floored(teacher_log_probs, config), _floored(candidate_log_probs, config)
    parts = log_p.exp() * (torch.where(is_token, log_p, 0.0) - log_q)
    return torch.where(is_token, parts, 0.0).sum(-1).clamp(min=0.0)


def _floored(log_probs: torch.Tensor, config: DistillationLossConfig) -> torch.Tensor:
    return log_probs if config.log_prob_min_clamp is None else log_probs.clamp(min=config.log_prob_min_clamp)


def bounded(losses: torch.Tensor, config: DistillationLossConfig) -> torch.Tensor:
    """The losses of tokens as they are learned from: within `loss_max_clamp`."""
    bound = config.loss_max_clamp
    return losses if bound is None else losses.clamp(-bound, bound)
