"""Held-out problems: generate greedily (or as `rollout.val_kwargs` says), score, average per data source."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.generation import Rollouts, joined
from verl.trainer.ppo.metric_utils import process_validation_metrics, validation_names
from verl.trainer.ppo.samples import SampleWriter, chosen, samples_of
from verl.utils.dataset import PromptLoader
from verl.utils.tracking_services import Sample
from verl.workers.config import PPOConfig
from verl.workers.reward_manager import Failures, RewardManager

logger = logging.getLogger(__name__)


class Validator:
    """Validates from the driver, with the servers of `rollouts`."""

    def __init__(
        self,
        *,
        config: PPOConfig,
        rollouts: Rollouts,
        reward_manager: RewardManager,
        dataloader: PromptLoader,
        show: Callable[[Sequence[Sample], int], None] = lambda samples, step: None,
    ) -> None:
        """`show` is called with `trainer.log_val_generations` samples of each validation, and its step."""
        self._config = config
        self._rollouts = rollouts
        self._reward_manager = reward_manager
        self._dataloader = dataloader
        self._show = show
        directory = config.trainer.validation_data_dir
        self._samples = SampleWriter(Path(directory) if directory else None)

    def validate(self, step: int) -> dict[str, float]:
        """`val-core/...` and `val-aux/...` metrics of the rollout engines' current version."""
        sources: list[str] = []
        uids: list[str] = []
        infos: dict[str, list[Any]] = defaultdict(list)
        turns: list[int] = []
        told: list[Sample] = []
        shown = self._config.trainer.log_val_generations
        per_prompt = self._config.actor_rollout_ref.rollout.val_kwargs.n
        failures = Failures(self._config.reward_model.max_failed, total=self._dataloader.num_prompts * per_prompt)
        self._samples.forget_after(step - 1)
        for batch_index, rows in enumerate(self._dataloader):
            prompts = DataProto.from_dict(non_tensors=rows)
            prompts.non_tensor_batch["uid"] = np.array(
                [f"{batch_index}-{row}" for row in range(len(prompts))], dtype=object
            )
            prompts.meta_info |= {"validate": True, "global_steps": step}
            prompts = prompts.repeat(per_prompt, interleave=True)
            batch = joined(prompts, self._rollouts.generate_sequences(prompts))
            reward = failures.score(self._reward_manager, batch)
            infos["reward"] += reward.reward_tensor.sum(-1).tolist()
            for name in {*infos, *reward.extra_info} - {"reward"}:  # a batch may lack what another has
                infos[name] += [None] * (len(sources) - len(infos[name]))
                infos[name] += reward.extra_info.get(name, [None] * len(batch))
            sources += batch.non_tensor_batch[self._config.data.reward_fn_key].tolist()
            uids += batch.non_tensor_batch["uid"].tolist()
            turns += batch.non_tensor_batch.get("__num_turns__", np.array([])).tolist()
            self._samples.write(step, batch, reward)
            told += samples_of(batch, reward) if shown else []
            if not batch_index:
                self._samples.show(f"held-out sample, step {step}", batch, reward, max(1, shown))
        if told:
            self._show(chosen(told, shown), step)
        metrics = validation_names(process_validation_metrics(sources, uids, infos))
        if turns:
            spread = {"min": min(turns), "max": max(turns), "mean": float(np.mean(turns))}
            metrics |= {f"val-aux/num_turns/{name}": value for name, value in spread.items()}
        return metrics | {"reward/val_abandoned": failures.failed}
