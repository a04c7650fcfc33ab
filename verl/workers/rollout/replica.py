"""verl's place for replicas and what they return."""

from verl.workers.rollout.base import RolloutReplica
from verl.workers.rollout.records import RolloutMode, TokenOutput

__all__ = ["RolloutMode", "RolloutReplica", "TokenOutput"]
