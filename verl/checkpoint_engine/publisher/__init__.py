"""Weights of any training loop into running vLLM servers: `WeightPublisher`."""

from verl.checkpoint_engine.publisher.publisher import PendingPush, WeightPublisher

__all__ = ["PendingPush", "WeightPublisher"]
