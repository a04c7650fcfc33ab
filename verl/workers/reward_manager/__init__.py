"""From responses to rewards per token."""

from verl.workers.reward_manager.naive import NaiveRewardManager, RewardError, RewardOutput
from verl.workers.reward_manager.overlong import OverlongPenalty, overlong_penalty

__all__ = ["NaiveRewardManager", "OverlongPenalty", "RewardError", "RewardOutput", "overlong_penalty"]
