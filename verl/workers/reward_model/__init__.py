"""Engines that serve a reward model over HTTP."""

from verl.workers.reward_model.engines import ServerSpec
from verl.workers.reward_model.server import RewardModelServer

__all__ = ["RewardModelServer", "ServerSpec"]
