"""verl 0.9's import path of reward managers; here they are in `verl.workers.reward_manager`."""

from verl.workers.reward_manager import RewardManagerBase, register

__all__ = ["RewardManagerBase", "register"]
