"""Where verl 0.9 has what scores responses; here it is in `verl.workers.reward_manager`."""

from verl.workers.reward_manager import RewardManagerBase, register

__all__ = ["RewardManagerBase", "register"]
