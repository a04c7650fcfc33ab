"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): drops groups whose responses all earn the same.

Advantages of such a group are 0: it has no gradient. Prompts are drawn until a batch is full of other groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isfinite

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.failures import NamedFailure
from verl.utils.plain import as_float
from verl.workers.config import PPOConfig
from verl.workers.reward_manager import RewardError, RewardOutput

KEY = "algorithm.filter_groups"
REWARD = "reward"
"""The metric that is the reward, whatever the reward function tells beside it."""
OF_REWARDS = (REWARD, "score", "seq_reward", "seq_final_reward")
"""Metrics that mean the reward itself; any other names a number that the reward function returns."""
logger = logging.getLogger(__name__)


class TooFewGroups(NamedFailure):
    """The permitted number of batches did not contain enough groups whose responses differ."""


def filling(config: PPOConfig, batches_of_data: int) -> DynamicBatch:
    """A new, empty batch of one step. `batches_of_data` is the number of batches in one pass over the data."""
    chosen = config.algorithm.filter_groups
    return DynamicBatch(
        metric=chosen.metric or "",
        wanted=config.data.train_batch_size,
        max_batches=chosen.max_num_gen_batches if chosen.max_num_gen_batches > 0 else batches_of_data,
    )


def generation_batch_size(config: PPOConfig) -> int:
    """The number of prompts that the driver draws and generates at a time."""
    if not config.algorithm.filter_groups.enable:
        return config.data.train_batch_size
    return config.data.gen_batch_size or config.data.train_batch_size


@dataclass
class DynamicBatch:
    """The batch of one step while it is being filled."""

    metric: str
    wanted: int
    """The number of groups in a full batch."""
    max_batches: int
    """The largest number of batches to draw."""
    drawn_batches: Fraction = Fraction(0)
    drawn_groups: int = 0
    kept_groups: int = 0
    _parts: list[tuple[DataProto, RewardOutput]] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.kept_groups >= self.wanted

    @property
    def missing(self) -> int:
        """The number of differing groups that a full batch still lacks."""
        return max(0, self.wanted - self.kept_groups)

    def add(self, batch: DataProto, reward: RewardOutput, *, batches: Fraction = Fraction(1)) -> set[str]:
        """Keep the groups of `batch` that differ, and return their uids. `batch` counts as `batches` drawn batches.

        Raises TooFewGroups if the batch is not full and `max_batches` are drawn.
        """
        values = metric_values(reward, self.metric)
        uids = batch.non_tensor_batch["uid"]
        groups = list(_groups(uids))
        # Not their standard deviation: that of three times 0.7 is not 0.
        differing = [rows for rows in groups if len(rows) == 1 or len({values[row] for row in rows}) > 1]
        self.drawn_batches += batches
        self.drawn_groups += len(groups)
        self.kept_groups += len(differing)
        self._parts.append(_selected(batch, reward, [row for rows in differing for row in rows]))
        if not self.is_full and self.drawn_batches >= self.max_batches:
            raise TooFewGroups(
                f"{self.kept_groups} of {self.drawn_groups} prompts have responses that differ in "
                f"{KEY}.metric={self.metric} after {float(self.drawn_batches):g} batches, but a step needs "
                f"{self.wanted}. The prompts are too easy or too hard, or {KEY}.max_num_gen_batches is too small"
            )
        logger.info("%d of %d groups after %g batches", self.kept_groups, self.wanted, float(self.drawn_batches))
        return {uids[rows[0]] for rows in differing}

    def result(self) -> tuple[DataProto, RewardOutput]:
        """The first `wanted` groups that were kept."""
        batch = DataProto.concat([part for part, _ in self._parts])
        reward = _joined([reward for _, reward in self._parts])
        rows = [row for group in list(_groups(batch.non_tensor_batch["uid"]))[: self.wanted] for row in group]
        return _selected(batch, reward, rows)

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "train/num_gen_batches": float(self.drawn_batches),
            "filter_groups/drawn": float(self.drawn_groups),
            "filter_groups/differing": float(self.kept_groups),
        }


def metric_values(reward: RewardOutput, metric: str) -> list[float]:
    """One number per response. Raises RewardError for a metric that the reward function does not return."""
    found = reward.extra_info.get(metric) if metric != REWARD else None
    if found is None and metric in (*OF_REWARDS, "acc"):  # of a function that returns its score alone
        return [float(score) for score in reward.reward_tensor.sum(-1)]
    numbers = [as_float(value) for value in found or [None]]
    if any(number is None or not isfinite(number) for number in numbers):
        known = sorted({*reward.extra_info, *OF_REWARDS})
        raise RewardError(f"{KEY}.metric={metric} is no number of every response; there is {', '.join(known)}")
    return [number for number in numbers if number is not None]


def _groups(uids: Sequence[str] | np.ndarray) -> Iterator[list[int]]:
    """The rows of each uid, in the order of their first."""
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        rows.setdefault(uid, []).append(row)
    yield from rows.values()


def _selected(batch: DataProto, reward: RewardOutput, rows: list[int]) -> tuple[DataProto, RewardOutput]:
    places = {row: place for place, row in enumerate(rows)}
    return batch.select_idxs(rows), RewardOutput(
        reward_tensor=reward.reward_tensor[rows],
        responses=[reward.responses[row] for row in rows],
        extra_info={name: [values[row] for row in rows] for name, values in reward.extra_info.items()},
        abandoned=[places[row] for row in reward.abandoned if row in places],
    )


def _joined(rewards: Sequence[RewardOutput]) -> RewardOutput:
    names = dict.fromkeys(name for reward in rewards for name in reward.extra_info)
    starts = np.cumsum([0, *(len(reward.responses) for reward in rewards)]).tolist()
    return RewardOutput(
        reward_tensor=torch.cat([reward.reward_tensor for reward in rewards]),
        responses=[text for reward in rewards for text in reward.responses],
        extra_info={
            name: [value for reward in rewards for value in reward.extra_info.get(name, [None] * len(reward.responses))]
            for name in names
        },
        abandoned=[start + row for start, reward in zip(starts, rewards, strict=False) for row in reward.abandoned],
    )
