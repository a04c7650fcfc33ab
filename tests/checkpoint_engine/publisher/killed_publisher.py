"""A publisher that is killed: `python -m tests.checkpoint_engine.publisher.killed_publisher URL`. Pushes 1, then 2."""

from __future__ import annotations

import sys

import torch

from verl.checkpoint_engine import WeightPublisher

if __name__ == "__main__":
    tensors = {"w": torch.full((8, 3), 1.0)}
    with WeightPublisher(tensors, sys.argv[1:]) as publisher:
        publisher.push(1)
        tensors["w"] = torch.full((8, 3), 2.0)
        publisher.push(2)
