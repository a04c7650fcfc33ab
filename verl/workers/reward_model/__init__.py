"""Engines that serve a reward model over HTTP."""

from verl.workers.reward_model.server import RewardModelServer, ServerSpec

__all__ = ["RewardModelServer", "ServerSpec"]
