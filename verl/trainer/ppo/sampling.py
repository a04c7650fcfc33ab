"""Draws the prompts of a step and generates the responses that it learns from."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.dynamic_sampling import DynamicBatch, filling
from verl.trainer.ppo.generation import HealingRollouts, joined
from verl.trainer.ppo.step import Step
from verl.trainer.ppo.traces import Traces
from verl.utils.dataset import PromptLoader
from verl.utils.seeds import derived_name
from verl.workers.config import PPOConfig
from verl.workers.reward_manager import RewardManager, RewardOutput


class Sampling:
    """Draws prompts and has rollout engines generate responses. Used on the driver."""

    def __init__(
        self,
        config: PPOConfig,
        rollouts: HealingRollouts,
        reward_manager: RewardManager,
        dataloader: PromptLoader,
        traces: Traces,
    ) -> None:
        self._config = config
        self._rollouts = rollouts
        self._reward_manager = reward_manager
        self._dataloader = dataloader
        self._traces = traces
        self._rows = chain.from_iterable(repeat(dataloader))
        self.needs_greedy = core_algos.BASELINES in core_algos.needed_by(config.algorithm.adv_estimator)

    def continue_after(self, position: Mapping[str, Any]) -> None:
        """Continue after `position`, a state of the data loader."""
        self._dataloader.load_state_dict(position)
        self._rows = chain.from_iterable(repeat(self._dataloader))

    def draw(self, step: int) -> DataProto:
        """The next prompts, for `step`; behind the end of an epoch, those of the next."""
        prompts = DataProto.from_dict(non_tensors=next(self._rows))
        uids = self._names(len(prompts))
        prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        prompts.meta_info["global_steps"] = step
        return prompts.repeat(self._config.actor_rollout_ref.rollout.n, interleave=True)

    def _names(self, count: int) -> list[str]:
        """Of the prompts just drawn; with `full_determinism` they follow from their place in the data."""
        trainer = self._config.trainer
        if not trainer.full_determinism:
            return [uuid.uuid4().hex for _ in range(count)]
        position = self._dataloader.state_dict()
        return [derived_name(trainer.seed, position["epoch"], position["position"], row) for row in range(count)]

    def generate(self, prompts: DataProto, now: Step) -> DataProto:
        return self.chosen(self.joined(prompts, self._generated(prompts, now), now), now)

    def chosen(self, batch: DataProto, now: Step) -> DataProto:
        """`batch`; with dynamic sampling, a full batch of groups that differ, from it and further prompts."""
        if not self._config.algorithm.filter_groups.enable:
            return batch
        filled = filling(self._config, len(self._dataloader))
        filled.add(batch, self._scored(batch, now))
        while not filled.is_full:
            prompts = self.draw(now.number)
            batch = self.joined(prompts, self._generated(prompts, now), now)
            filled.add(batch, self._scored(batch, now))
        return self.full(filled, now)

    def full(self, filled: DynamicBatch, now: Step) -> DataProto:
        """The full batch of a step."""
        now.metrics |= filled.metrics
        batch, now.reward = filled.result()
        return batch

    def _scored(self, batch: DataProto, now: Step) -> RewardOutput:
        return now.scored(self._reward_manager, batch, self._config.reward_model.max_failed)

    def _generated(self, prompts: DataProto, now: Step) -> DataProto:
        with self._traces.of_engines(now.number):
            return self._rollouts.generate_sequences(prompts)

    def joined(self, prompts: DataProto, generated: DataProto, now: Step, greedy: DataProto | None = None) -> DataProto:
        """`greedy` has the responses to `greedily(prompts)`; if needed and None, they are generated here."""
        now.metrics |= generated.meta_info.pop("timing", {})
        baselines = None
        if self.needs_greedy:
            asked = self.greedily(prompts)
            if greedy is None:
                with now.timed("gen_max"):
                    greedy = self._rollouts.generate_sequences(asked)
            greedy.meta_info.pop("timing", None)
            baselines = self.baselines(joined(asked, greedy), now)
        batch = joined(prompts, generated)
        if baselines is not None:
            tensors_of(batch)[core_algos.BASELINES] = baselines
        return batch

    def greedily(self, prompts: DataProto) -> DataProto:
        """Each distinct prompt once, with settings for one greedy response."""
        once: DataProto = prompts[:: self._config.actor_rollout_ref.rollout.n]
        once.meta_info = {**prompts.meta_info, "greedy": True}
        return once

    def baselines(self, greedy: DataProto, now: Step) -> torch.Tensor:
        """The rewards of the greedy responses, repeated for every response to the same prompt."""
        rewards: torch.Tensor = self._scored(greedy, now).reward_tensor.sum(-1)
        now.metrics["reward/greedy/mean"] = rewards.mean().item()
        return rewards.repeat_interleave(self._config.actor_rollout_ref.rollout.n)
