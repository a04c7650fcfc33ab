"""verl's import path."""

from verl.workers.reward_manager import get_reward_manager_cls, register

__all__ = ["get_reward_manager_cls", "register"]
