"""From responses to rewards per token."""

from verl.workers.reward_manager.naive import NaiveRewardManager, RewardError, RewardOutput
from verl.workers.reward_manager.overlong import OverlongPenalty, overlong_penalty
from verl.workers.reward_manager.registry import OwnRewardManager, get_reward_manager_cls, register

RewardManager = NaiveRewardManager | OwnRewardManager

__all__ = [
    "NaiveRewardManager",
    "OverlongPenalty",
    "OwnRewardManager",
    "RewardError",
    "RewardManager",
    "RewardOutput",
    "get_reward_manager_cls",
    "overlong_penalty",
    "register",
]
