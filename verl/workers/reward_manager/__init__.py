"""From responses to rewards per token."""

from verl.workers.reward_manager.naive import NaiveRewardManager, RewardError, RewardOutput

__all__ = ["NaiveRewardManager", "RewardError", "RewardOutput"]
