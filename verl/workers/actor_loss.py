"""The loss that an actor worker minimises, put together from `verl.workers.losses` as the configuration says."""

from __future__ import annotations

import torch

from verl.protocol import DataProto, tensors_of
from verl.workers.config import ActorConfig
from verl.workers.losses import LossTotals, agg_loss, get_policy_loss_fn, kl_penalty


class ActorLoss:
    """Policy loss, entropy bonus and KL penalty. A `verl.workers.engine.base.LossFunction`.

    Reads `old_log_probs`, `advantages`, `response_mask` and, where the configuration or the driver asks for them,
    `ref_log_prob` and `rollout_is_weights`.
    """

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)

    def __call__(
        self,
        log_prob: torch.Tensor,
        entropy: torch.Tensor | None,
        micro_batch: DataProto,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        batch, config = tensors_of(micro_batch), self._config
        mask = batch["response_mask"]
        loss, policy_metrics = self._policy_loss(
            batch["old_log_probs"],
            log_prob,
            batch["advantages"],
            mask,
            config,
            batch.get("rollout_is_weights", None),
            totals=totals,
        )
        metrics: dict[str, float | torch.Tensor] = {**policy_metrics, "actor/pg_loss": loss.detach()}
        if entropy is not None:
            entropy_loss = agg_loss(entropy, mask, config.loss_agg_mode, totals=totals)
            metrics["actor/entropy_loss"] = entropy_loss.detach()
            loss = loss - config.entropy_coeff * entropy_loss
        if config.use_kl_loss:
            divergence = kl_penalty(log_prob, batch["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(divergence, mask, config.loss_agg_mode, totals=totals)
            metrics["actor/kl_loss"] = kl_loss.detach()
            loss = loss + config.kl_loss_coef * kl_loss
        return loss, metrics
