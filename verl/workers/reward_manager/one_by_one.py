"""Reward managers that score one sample at a time, as those of verl's reward loop do."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import torch

from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.protocol import DataProto, tensors_of


class RewardManagerBase(ABC):
    """Base of a user's own. Made once, on the driver: from the run's configuration, tokenizer and reward function."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the one sample of `data`: {"reward_score": float, "reward_extra_info": {...}}, the latter optional.

        All samples of a batch are scored concurrently, on one event loop that lives as long as the run.
        """


class OneByOne:
    """Calls such a manager for every sample of a batch; the score is the reward of the response's last token."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._loop = LoopThread("reward-manager")

    def __call__(self, data: DataProto, return_dict: bool = True) -> dict[str, Any]:
        """Score a batch. Raises errors of `run_single`, and KeyError or ValueError for a result without a score."""
        results = self._loop.run(self._all(data))
        responses, mask = tensors_of(data)["responses"], tensors_of(data)["attention_mask"]
        rewards = torch.zeros(responses.shape, dtype=torch.float32)
        lengths = mask[:, -responses.shape[1] :].sum(-1).tolist()
        for row, (length, result) in enumerate(zip(lengths, results, strict=True)):
            if length:
                rewards[row, int(length) - 1] = float(result["reward_score"])
        others = [result.get("reward_extra_info") or {} for result in results]
        keys = {key: None for other in others for key in other}
        return {
            "reward_tensor": rewards,
            "reward_extra_info": {key: [other.get(key) for other in others] for key in keys},
        }

    async def _all(self, data: DataProto) -> list[dict[str, Any]]:
        scoring = (self._manager.run_single(data[row : row + 1]) for row in range(len(data)))
        results: list[dict[str, Any]] = await asyncio.gather(*scoring)
        return results

    def close(self) -> None:
        self._loop.close()
