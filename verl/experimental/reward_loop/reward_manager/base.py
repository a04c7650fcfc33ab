"""verl's import path."""

from verl.workers.reward_manager import RewardManagerBase

__all__ = ["RewardManagerBase"]
