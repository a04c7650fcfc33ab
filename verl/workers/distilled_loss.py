"""The loss of an actor worker that learns from a teacher: added to the policy loss, or instead of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from verl.protocol import DataProto, tensors_of
from verl.utils.config import ConfigError
from verl.workers.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, DistillationLossConfig, RolloutCorrectionConfig
from verl.workers.engine.base import CANDIDATE_LOG_PROBS
from verl.workers.losses import LossTotals, agg_loss, get_policy_loss_fn
from verl.workers.losses.correction import learned_from
from verl.workers.losses.distillation import bounded, forward_kl_topk, reverse_kl
from verl.workers.losses.policy import token_share

TEACHER_LOG_PROBS = "teacher_log_probs"
"""Tensor of a batch: the teacher's log-probs of the response's tokens, float32 [B, R]."""
TEACHER_CANDIDATE_LOG_PROBS = "teacher_candidate_log_probs"
"""Tensor of a batch: its log-probs of `CANDIDATES`, its likeliest tokens, float32 [B, R, K]."""
PREFIX = "actor/distillation/"


class DistilledLoss:
    """A `verl.workers.engine.base.LossFunction`. Reads the tensors of `ActorLoss` and the teachers' log-probs."""

    def __init__(
        self, config: ActorConfig, distillation: DistillationLossConfig, correction: RolloutCorrectionConfig | None
    ) -> None:
        self._config, self._distillation = config, distillation
        self._of_task = ActorLoss(config, correction)
        self._policy_loss: Any = get_policy_loss_fn(distillation.policy_loss_mode)
        self._clip = ActorConfig(
            clip_ratio=distillation.clip_ratio,
            clip_ratio_low=distillation.clip_ratio_low,
            clip_ratio_high=distillation.clip_ratio_high,
        )

    def __call__(
        self,
        log_prob: torch.Tensor,
        entropy: torch.Tensor | None,
        micro_batch: DataProto,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        totals = replace(totals, loss_scale_factor=self._config.loss_scale_factor)
        loss, metrics = self._distilled(log_prob, micro_batch, totals)
        if not self._distillation.use_task_rewards:
            return loss, metrics
        of_task, of_task_metrics = self._of_task(log_prob, entropy, micro_batch, totals)
        return of_task + self._distillation.distillation_loss_coef * loss, of_task_metrics | metrics

    def _distilled(
        self, log_prob: torch.Tensor, micro_batch: DataProto, totals: LossTotals
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        mask, mode = learned_from(tensors_of(micro_batch)), self._config.loss_agg_mode
        losses, metrics = self._token_losses(log_prob, micro_batch, totals)
        metrics["abs_loss"] = token_share(losses.abs(), mask, totals)
        losses = bounded(losses, self._distillation)
        if self._distillation.use_policy_gradient:
            loss, of_policy = self._as_rewards(-losses.detach(), log_prob, micro_batch, totals)
            metrics |= {name.removeprefix("actor/"): value for name, value in of_policy.items()}
        else:
            loss = agg_loss(losses, mask, mode, totals=totals)
        metrics["loss"] = loss.detach()
        return loss, {PREFIX + name: value for name, value in metrics.items()}

    def _token_losses(
        self, log_prob: torch.Tensor, micro_batch: DataProto, totals: LossTotals
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        batch = tensors_of(micro_batch)
        if not self._distillation.uses_topk:
            return reverse_kl(log_prob, batch[TEACHER_LOG_PROBS], self._distillation), {}
        if CANDIDATE_LOG_PROBS not in batch:
            raise ConfigError(
                f"distillation.distillation_loss.loss_mode={self._distillation.loss_mode}: the training engine returns "
                "log-probs of the tokens of responses alone, not of others: set it to k3, or strategy=fsdp2"
            )
        of_student, of_teacher = batch[CANDIDATE_LOG_PROBS], batch[TEACHER_CANDIDATE_LOG_PROBS]
        is_token, mask = of_teacher > float("-inf"), learned_from(batch)
        masses = {
            "student_mass": torch.where(is_token, of_student.detach().exp(), 0.0).sum(-1),
            "teacher_mass": of_teacher.exp().sum(-1),
        }
        metrics: dict[str, float | torch.Tensor] = {
            name: token_share(mass, mask, totals) for name, mass in masses.items()
        }
        return forward_kl_topk(of_student, of_teacher, self._distillation), metrics

    def _as_rewards(
        self, rewards: torch.Tensor, log_prob: torch.Tensor, micro_batch: DataProto, totals: LossTotals
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The clipped policy loss of which they are the advantages: each token has its own, and no baseline."""
        batch = tensors_of(micro_batch)
        found: tuple[torch.Tensor, dict[str, float]] = self._policy_loss(
            old_log_prob=batch["old_log_probs"],
            log_prob=log_prob,
            advantages=rewards,
            response_mask=learned_from(batch),
            loss_agg_mode=self._config.loss_agg_mode,
            config=self._clip,
            rollout_is_weights=batch.get("rollout_is_weights", None),
            totals=totals,
        )
        return found
