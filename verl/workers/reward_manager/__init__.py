"""From responses to rewards per token."""

from typing import Protocol, Self

from verl.protocol import DataProto
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.naive import Failures, NaiveRewardManager, RewardError, RewardOutput
from verl.workers.reward_manager.one_by_one import RewardManagerBase
from verl.workers.reward_manager.overlong import OverlongPenalty, overlong_penalty
from verl.workers.reward_manager.registry import OwnRewardManager, get_reward_manager_cls, register


class RewardManager(Protocol):
    """Scores batches, inside of a `with`."""

    def __call__(self, data: DataProto) -> RewardOutput: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


__all__ = [
    "AbstractRewardManager",
    "Failures",
    "NaiveRewardManager",
    "OverlongPenalty",
    "OwnRewardManager",
    "RewardError",
    "RewardManager",
    "RewardManagerBase",
    "RewardOutput",
    "get_reward_manager_cls",
    "overlong_penalty",
    "register",
]
