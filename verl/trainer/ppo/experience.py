"""Adds rewards, log-probs and advantages to samples: what critic and actor learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, tensors_of
from verl.trainer.fleet.cluster import Cluster
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.even_batches import padded
from verl.trainer.ppo.kl_control import KLController
from verl.trainer.ppo.mismatch_probe import MismatchProbe
from verl.trainer.ppo.needs import needs_reference
from verl.trainer.ppo.policy_filtration import filtered
from verl.trainer.ppo.samples import SampleWriter
from verl.trainer.ppo.step import Metrics, Step
from verl.utils.plain import as_float
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.config import PPOConfig
from verl.workers.engine.base import ROUTES
from verl.workers.losses.correction import KEPT
from verl.workers.reward_manager import RewardError, RewardManager, RewardOutput


class Experience:
    """Adds the tensors that an update needs to the samples of a step. The driver calls it; trainer ranks compute."""

    def __init__(
        self,
        config: PPOConfig,
        cluster: Cluster,
        reward_manager: RewardManager,
        kl_ctrl: KLController,
        samples: SampleWriter,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._reward_manager = reward_manager
        self._kl_ctrl = kl_ctrl
        self._samples = samples
        self._probe = MismatchProbe(config.trainer.output_dir, config.trainer.mismatch_probe_freq)
        self._needed = core_algos.needed_by(config.algorithm.adv_estimator)
        self._advantages = core_algos.get_adv_estimator_fn(config.algorithm.adv_estimator)

    def score(self, batch: DataProto, now: Step) -> DataProto:
        """Add `token_level_scores` to the batch; the reward function's other numbers become metrics."""
        if now.reward is None:
            now.reward = now.scored(self._reward_manager, batch, self._config.reward_model.max_failed)
        reward = now.reward
        tensors_of(batch)["token_level_scores"] = reward.reward_tensor
        if core_algos.COMPONENTS in self._needed:
            keys = self._config.algorithm.gdpo_reward_keys
            tensors_of(batch)[core_algos.COMPONENTS] = reward_components(reward, keys)
        now.metrics |= _means("reward_extra", reward.extra_info) | {"reward/abandoned": len(reward.abandoned)}
        self._samples.write(now.number, batch, reward)
        frequency = self._config.trainer.show_samples_freq
        if frequency > 0 and now.number % frequency == 0:
            self._samples.show(f"sample, step {now.number}", batch, reward, 1)
        return self._balanced(padded(batch, self._cluster.actor.world_size), now)

    def add_old_log_probs(self, batch: DataProto, now: Step) -> DataProto:
        """Add the policy's log-probs before the update; metrics compare them with the rollout engine's."""
        tensors = tensors_of(batch)
        mask = tensors["response_mask"]
        if self._config.actor_rollout_ref.actor.use_rollout_log_probs:
            tensors["old_log_probs"] = tensors["rollout_log_probs"]
            return batch
        computed = tensors_of(self._cluster.actor.compute_log_prob(batch))
        tensors["old_log_probs"], entropys = computed["old_log_probs"], computed["entropys"]
        if ROUTES in computed:
            tensors[ROUTES] = computed[ROUTES]
        if core_algos.SUM_PI_SQUARED in self._needed:
            tensors[core_algos.SUM_PI_SQUARED] = self._sum_pi_squared(batch)
        actor = self._config.actor_rollout_ref.actor
        entropy = core_algos.agg_loss(entropys, mask, actor.loss_agg_mode, loss_scale_factor=actor.loss_scale_factor)
        now.metrics["actor/entropy"] = entropy.item()
        if "rollout_log_probs" in tensors:
            old, rollout = tensors["old_log_probs"], tensors["rollout_log_probs"]
            now.metrics |= core_algos.rollout_probs_diff_metrics(old, rollout, mask)
            self._probe.keep(now.number, batch)
            weights, metrics = core_algos.compute_rollout_importance_weights(
                old, rollout, mask, self._config.algorithm.rollout_correction
            )
            now.metrics |= metrics
            if weights is not None:
                tensors["rollout_is_weights"] = weights
        return batch

    def _sum_pi_squared(self, batch: DataProto) -> torch.Tensor:
        """The sum over the vocabulary of squared probabilities, [B, R], from two log-probs of the same token.

        With z = logits / temperature, log pi is z - lse(z), and at half the temperature 2 z - lse(2 z); the sum is
        exp(lse(2 z) - 2 lse(z)). So every training engine can tell it, for one more pass.
        """
        temperature = self._config.actor_rollout_ref.rollout.temperature
        sharper = DataProto(batch.batch, batch.non_tensor_batch, {**batch.meta_info, "temperature": temperature / 2})
        at_half: torch.Tensor = tensors_of(self._cluster.actor.compute_log_prob(sharper))["old_log_probs"]
        log_prob: torch.Tensor = tensors_of(batch)["old_log_probs"]
        return (2.0 * log_prob - at_half).exp().clamp(max=1.0)

    def add_reference_log_probs(self, batch: DataProto) -> DataProto:
        if not needs_reference(self._config):
            return batch
        return batch.union(self._cluster.actor.compute_ref_log_prob(batch))

    def add_advantages(self, batch: DataProto, now: Step) -> DataProto:
        """Compute advantages from the rewards (with the KL penalty, if configured), by groups of one prompt."""
        tensors, algorithm = tensors_of(batch), self._config.algorithm
        rewards = tensors["token_level_scores"]
        if algorithm.use_kl_in_reward:
            rewards, metrics = core_algos.apply_kl_penalty(
                rewards,
                tensors["old_log_probs"],
                tensors["ref_log_prob"],
                tensors["response_mask"],
                kl_ctrl=self._kl_ctrl,
                kl_penalty=algorithm.kl_penalty,
            )
            now.metrics |= metrics
        tensors["token_level_rewards"] = rewards
        tensors["advantages"], tensors["returns"] = self._advantages(
            token_level_rewards=rewards,
            response_mask=tensors["response_mask"],
            index=batch.non_tensor_batch["uid"],
            config=algorithm,
            **{name: tensors.get(name, None) for name in self._needed},
        )
        self._reject(batch, now)
        return batch

    def _reject(self, batch: DataProto, now: Step) -> None:
        """Leave out of the update what the rollout engine's policy and the trainer's are too far apart for."""
        tensors, correction = tensors_of(batch), self._config.algorithm.rollout_correction
        if self._config.actor_rollout_ref.actor.use_rollout_log_probs or not correction.rejects:
            return  # the loss does it, with the policy as it is then
        tensors[KEPT], metrics = core_algos.rejected(
            tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"], correction
        )
        now.metrics |= metrics

    def filtered(self, batch: DataProto, now: Step) -> DataProto:
        """The samples of `batch` to update on: all of them, or with policy filtration a draw from them."""
        if not self._config.algorithm.use_pf_ppo:
            return batch
        drawn, metrics = filtered(batch, self._config.algorithm.pf_ppo, self._config.trainer.seed + now.number)
        now.metrics |= metrics
        return self._balanced(padded(drawn, self._config.trainer.world_size), now)

    def _balanced(self, batch: DataProto, now: Step) -> DataProto:
        """Reorder so that every rank's part has about the same number of tokens."""
        if not self._config.trainer.balance_batch:
            return batch
        lengths = tensors_of(batch)["attention_mask"].sum(-1).tolist()
        parts = get_seqlen_balanced_partitions(lengths, self._cluster.actor.world_size, equal_size=True)
        now.metrics |= log_seqlen_unbalance(lengths, parts, "global_seqlen")
        batch.reorder(torch.tensor([index for part in parts for index in part]))
        return batch


def reward_components(reward: RewardOutput, keys: Sequence[str]) -> torch.Tensor:
    """The numbers that the reward function returned under `keys`, [B, len(keys)].

    Raises RewardError for a response without one of them.
    """
    components = torch.zeros(len(reward.responses), len(keys))
    for column, key in enumerate(keys):
        for row, value in enumerate(reward.extra_info.get(key, [None] * len(components))):
            number = as_float(value)
            if number is None or not isfinite(number):
                raise RewardError(
                    f"algorithm.gdpo_reward_keys: the reward function returned {key}={value!r} for sample {row}, not a "
                    f"finite number; it has {', '.join(reward.extra_info) or 'no numbers beside the score'}"
                )
            components[row, column] = number
    return components


def _means(prefix: str, columns: Mapping[str, list[Any]]) -> Metrics:
    """Means of the columns that hold numbers."""
    found = {
        name: [number for each in values if (number := as_float(each)) is not None] for name, values in columns.items()
    }
    with np.errstate(invalid="ignore"):  # of infinities of both signs
        return {f"{prefix}/{name}/mean": float(np.mean(numbers)) for name, numbers in found.items() if numbers}
