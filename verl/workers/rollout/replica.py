"""The names of verl's module for replicas and their results."""

from verl.workers.rollout.base import RolloutReplica
from verl.workers.rollout.records import RolloutMode, TokenOutput

__all__ = ["RolloutMode", "RolloutReplica", "TokenOutput"]
