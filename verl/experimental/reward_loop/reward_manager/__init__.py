"""verl's import path."""

from verl.workers.reward_manager import RewardManagerBase, get_reward_manager_cls, register

__all__ = ["RewardManagerBase", "get_reward_manager_cls", "register"]
