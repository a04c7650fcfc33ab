"""From responses to rewards per token."""

from verl.workers.reward_manager.naive import NaiveRewardManager, RewardError, RewardOutput
from verl.workers.reward_manager.registry import OwnRewardManager, get_reward_manager_cls, register

RewardManager = NaiveRewardManager | OwnRewardManager

__all__ = [
    "NaiveRewardManager",
    "OwnRewardManager",
    "RewardError",
    "RewardManager",
    "RewardOutput",
    "get_reward_manager_cls",
    "register",
]
