"""A publisher that is killed: `python -m tests.checkpoint_engine.publisher.killed_publisher URL [MODEL]`.

Pushes 1, then 2, of a model whose weights are larger by a hundredth, or of a few numbers. With `far` for MODEL it is
numbers, and nothing of the arena can be kept, as where the server is on another host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from verl.checkpoint_engine import WeightPublisher
from verl.checkpoint_engine.parameter_server.rescue import Rescue


def weights_of(version: int, model: Path | None = None) -> dict[str, torch.Tensor]:
    if model is None:
        return {"w": torch.full((8, 3), float(version))}
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(model).named_parameters()
    return {name: tensor.detach() * (1 + version / 100) for name, tensor in state}


if __name__ == "__main__":
    url, *model = sys.argv[1:]
    if model == ["far"]:
        model, Rescue._keep = [], lambda *_: None  # type: ignore[method-assign]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    tensors = weights_of(1, *map(Path, model))
    with WeightPublisher(tensors, [url]) as publisher:
        publisher.push(1)
        tensors.update(weights_of(2, *map(Path, model)))
        publisher.push(2)
