"""Weights of any training loop into running vLLM servers: `WeightPublisher`, and TRL's trainers through it."""

from .publisher import PendingPush, WeightPublisher
from .trl import TRLWeightTransfer

__all__ = ["PendingPush", "TRLWeightTransfer", "WeightPublisher"]
