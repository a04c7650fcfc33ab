"""Reward managers: they turn responses into rewards per token."""

from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.naive import (
    Failures,
    GivenUp,
    NaiveRewardManager,
    RewardError,
    RewardManager,
    RewardOutput,
)
from verl.workers.reward_manager.one_by_one import RewardManagerBase
from verl.workers.reward_manager.overlong import OverlongPenalty, overlong_penalty
from verl.workers.reward_manager.registry import OwnRewardManager, get_reward_manager_cls, register

__all__ = [
    "AbstractRewardManager",
    "Failures",
    "GivenUp",
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
