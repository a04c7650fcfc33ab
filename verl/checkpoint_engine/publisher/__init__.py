"""Weights of any training loop into running vLLM servers: `WeightPublisher`."""

from .publisher import PendingPush, WeightPublisher

__all__ = ["PendingPush", "WeightPublisher"]
