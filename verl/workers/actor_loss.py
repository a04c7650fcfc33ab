"""The loss that an actor worker minimises, composed of `verl.workers.losses` by the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from verl.protocol import DataProto, tensors_of
from verl.utils.config import ConfigError, from_mapping
from verl.workers.config import ActorConfig, RolloutCorrectionConfig
from verl.workers.losses import (
    LossTotals,
    agg_loss,
    compute_policy_loss_reinforce,
    get_policy_loss_fn,
    kl_penalty,
    within_mini_batch,
)
from verl.workers.losses.aggregation import totals_in_force
from verl.workers.losses.correction import importance_weights, kept_tokens, learned_from
from verl.workers.losses.correction_metrics import off_policy_metrics, rejection_metrics, weight_metrics
from verl.workers.losses.policy import token_share


class ActorLoss:
    """Policy loss, entropy bonus and KL penalty. A `verl.workers.engine.base.LossFunction`.

    Reads `old_log_probs`, `advantages`, `response_mask` and, where the configuration or the driver asks for them,
    `ref_log_prob`, `rollout_is_weights` and what was rejected before the update. A rejected token is in no term; each
    term is divided by all tokens of `response_mask`, as those that are rejected here are known too late for a count.
    """

    def __init__(self, config: ActorConfig, correction: RolloutCorrectionConfig | None = None) -> None:
        """`correction` is applied here, where `old_log_probs` are the rollout engine's."""
        self._config = config
        self._correction = correction
        mode = config.policy_loss.loss_mode
        self._policy_loss: Any = _reinforce if correction and _weighs(correction) else get_policy_loss_fn(mode)
        self._takes_totals = "totals" in inspect.signature(self._policy_loss).parameters

    def __call__(
        self,
        log_prob: torch.Tensor,
        entropy: torch.Tensor | None,
        micro_batch: DataProto,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        batch, config = tensors_of(micro_batch), self._config
        totals = replace(totals, loss_scale_factor=config.loss_scale_factor)
        loss, policy_metrics, mask = self._policy_share(log_prob, micro_batch, totals)
        metrics: dict[str, float | torch.Tensor] = {**policy_metrics, "actor/pg_loss": loss.detach()}
        if entropy is not None:
            entropy_loss = agg_loss(entropy, mask, config.loss_agg_mode, totals=totals)
            metrics["actor/entropy_loss"] = entropy_loss.detach()
            if config.entropy_coeff:
                loss = loss - config.entropy_coeff * entropy_loss
        if config.use_kl_loss:
            divergence = kl_penalty(log_prob, batch["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(divergence, mask, config.loss_agg_mode, totals=totals)
            metrics["actor/kl_loss"] = kl_loss.detach()
            loss = loss + config.kl_loss_coef * kl_loss
        return loss, metrics

    def _policy_share(
        self, log_prob: torch.Tensor, micro_batch: DataProto, totals: LossTotals
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor], torch.Tensor]:
        """The policy loss and its metrics, both as shares of the mini-batch's, and the tokens that are learned from.

        Raises ConfigError for a loss that returns anything else.
        """
        batch = tensors_of(micro_batch)
        mask, weights = learned_from(batch), batch.get("rollout_is_weights", None)
        correction: Corrected | None = None
        if self._correction is not None:
            correction = corrected(log_prob.detach(), batch["old_log_probs"], mask, self._correction, totals)
            mask, weights = correction.mask, correction.weights
        with within_mini_batch(totals):
            result = self._policy_loss(
                old_log_prob=batch["old_log_probs"],
                log_prob=log_prob,
                advantages=batch["advantages"],
                response_mask=mask,
                loss_agg_mode=self._config.loss_agg_mode,
                config=self._config,
                rollout_is_weights=weights,
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
        elif correction is not None:
            metrics = correction.of_kept(metrics)
        return loss, metrics | ({} if correction is None else correction.metrics), mask


def _reinforce(
    *, old_log_prob: torch.Tensor, totals: LossTotals, **given: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    return compute_policy_loss_reinforce(old_log_prob, totals=totals, **given)


def _weighs(correction: RolloutCorrectionConfig) -> bool:
    return correction.loss_type == "reinforce"


class Corrected(NamedTuple):
    mask: torch.Tensor
    """[B, R]: the tokens to learn from, of the dtype of `response_mask`."""
    weights: torch.Tensor | None
    metrics: dict[str, float | torch.Tensor]
    """Metrics, as shares of the mini-batch's."""
    learned: float
    """The number of tokens in the mask."""
    written: float
    """The number of tokens before rejection."""

    def of_kept(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Sums over the tokens that are kept, divided by all, as means over those that are kept."""
        return {name: value * self.written / max(self.learned, 1.0) for name, value in metrics.items()}


def corrected(
    log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    config: RolloutCorrectionConfig,
    totals: LossTotals,
) -> Corrected:
    """What the policy as it is, against the rollout engine's, leaves to learn from.

    PPO's ratio is the importance weight already: only the plain policy gradient has weights of its own. What is told of
    this micro-batch alone, extremes among it, counts as much as its tokens do in the mini-batch. All of it, up to 60
    numbers, is computed on the host from one copy: on the device each would be waited for.
    """
    device, dtype = response_mask.device, log_prob.dtype
    inputs = (log_prob, rollout_log_prob.to(dtype), response_mask.to(dtype))
    log_prob, rollout_log_prob, written = torch.stack(inputs).to("cpu", copy=True)
    mask = written.bool()
    told = mask if mask.any() else torch.ones_like(mask)  # of nothing the same names: ranks add up what they tell
    log_prob, rollout_log_prob = (torch.where(mask, each, 0.0) for each in (log_prob, rollout_log_prob))
    log_ratio = log_prob - rollout_log_prob
    kept = kept_tokens(log_ratio, mask, config)
    of_micro_batch = off_policy_metrics(log_prob, rollout_log_prob, told)
    for rejection in config.rejections:
        of_micro_batch |= rejection_metrics(log_ratio, told, *rejection)
    weights, ratios = importance_weights(log_ratio, told, config)
    if ratios is not None:
        of_micro_batch |= weight_metrics(log_ratio, ratios, told, config)
    share = mask.sum().item() / max(totals.num_tokens, 1.0)
    metrics: dict[str, float | torch.Tensor] = {name: value * share for name, value in of_micro_batch.items()}
    if config.rejects:
        changed = (kept != mask).any(-1).sum().item()
        metrics["rollout_corr/rollout_rs_masked_fraction"] = token_share((~kept).float(), mask, totals)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = changed / max(totals.num_sequences, 1.0)
    return Corrected(
        mask=kept.to(device, response_mask.dtype),
        weights=weights.to(device) if weights is not None and _weighs(config) else None,
        metrics=metrics,
        learned=kept.sum().item(),
        written=mask.sum().item(),
    )


def compute_policy_loss_bypass_mode(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    correction: RolloutCorrectionConfig | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss where `old_log_prob` is the rollout engine's, and its metrics; tensors are [B, R].

    `correction` is what is rejected and weighed, by the policy as it is, and the kind of loss; None: the options in
    verl's place, `config.policy_loss.rollout_correction`, which may be a mapping. `rollout_is_weights` are not used.
    Within a mini-batch the loss and the metrics are shares of its own, as those of policy losses are.

    Raises ConfigError without a correction.
    """
    if correction is None:
        correction = _in_verls_place(config)
    totals = totals_in_force(response_mask)
    found = corrected(log_prob.detach(), old_log_prob, response_mask, correction, totals)
    with within_mini_batch(totals):
        if _weighs(correction):
            given = (old_log_prob, log_prob, advantages, found.mask, loss_agg_mode, config, found.weights)
            loss, of_policy = compute_policy_loss_reinforce(*given)
        else:
            mode = "vanilla" if config is None else config.policy_loss.loss_mode
            loss, of_policy = get_policy_loss_fn("vanilla" if mode == "bypass_mode" else mode)(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=advantages,
                response_mask=found.mask,
                loss_agg_mode=loss_agg_mode,
                config=config,
                rollout_is_weights=None,
            )
    return loss, {**found.of_kept(of_policy), **found.metrics}


def _in_verls_place(config: Any) -> RolloutCorrectionConfig:
    found = getattr(getattr(config, "policy_loss", None), "rollout_correction", None)
    if isinstance(found, Mapping):
        return from_mapping(RolloutCorrectionConfig, found)
    if isinstance(found, RolloutCorrectionConfig):
        return found
    raise ConfigError(
        "compute_policy_loss_bypass_mode needs correction=RolloutCorrectionConfig(...), the section "
        "algorithm.rollout_correction"
    )
