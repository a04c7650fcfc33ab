"""The loss that an actor worker minimises, put together from `verl.workers.losses` as the configuration says."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from verl.protocol import DataProto, tensors_of
from verl.utils.config import ConfigError
from verl.workers.config import ActorConfig
from verl.workers.losses import LossTotals, agg_loss, get_policy_loss_fn, kl_penalty, within_mini_batch


class ActorLoss:
    """Policy loss, entropy bonus and KL penalty. A `verl.workers.engine.base.LossFunction`.

    Reads `old_log_probs`, `advantages`, `response_mask` and, where the configuration or the driver asks for them,
    `ref_log_prob` and `rollout_is_weights`.
    """

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._policy_loss: Any = get_policy_loss_fn(config.policy_loss.loss_mode)
        self._takes_totals = "totals" in inspect.signature(self._policy_loss).parameters

    def __call__(
        self,
        log_prob: torch.Tensor,
        entropy: torch.Tensor | None,
        micro_batch: DataProto,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        batch, config = tensors_of(micro_batch), self._config
        mask = batch["response_mask"]
        loss, policy_metrics = self._policy_share(log_prob, micro_batch, totals)
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

    def _policy_share(
        self, log_prob: torch.Tensor, micro_batch: DataProto, totals: LossTotals
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        """The policy loss and its metrics, both as shares of the mini-batch's. Raises ConfigError for anything else."""
        batch = tensors_of(micro_batch)
        with within_mini_batch(totals):
            result = self._policy_loss(
                old_log_prob=batch["old_log_probs"],
                log_prob=log_prob,
                advantages=batch["advantages"],
                response_mask=batch["response_mask"],
                loss_agg_mode=self._config.loss_agg_mode,
                config=self._config,
                rollout_is_weights=batch.get("rollout_is_weights", None),
                **({"totals": totals} if self._takes_totals else {}),
            )
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            mode = self._config.policy_loss.loss_mode
            raise ConfigError(
                f"actor.policy_loss.loss_mode={mode}: a loss returns (loss, dict of metrics), not {result}"
            )
        loss, metrics = result
        if not self._takes_totals:
            share = float(batch["response_mask"].sum()) / max(totals.num_tokens, 1.0)
            metrics = {name: value * share for name, value in metrics.items()}
        return loss, metrics
