"""Load weights from Megatron's own distributed checkpoints, written by any layout of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint_engine.errors import PlanError
from verl.workers.engine.megatron import library


@torch.no_grad()
@library.quiet()
def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], directory: Path, prefix: str) -> None:
    """Fill `weights`, this rank's memory under the names of `model`, from `directory`. A collective of all ranks.

    `prefix` stands before the names in the checkpoint. Raises PlanError for tensors that it has not, or has in
    another shape.
    """
    described: Any = model
    state = {
        name.removeprefix(prefix): entry
        for name, entry in described.sharded_state_dict(prefix=prefix).items()
        if name.removeprefix(prefix) in weights
    }
    if missing := weights.keys() - state.keys():
        raise PlanError(f"Megatron's model names no place in a distributed checkpoint for {', '.join(sorted(missing))}")
    for name, entry in state.items():
        entry.data = weights[name]
        if isinstance(entry, library.ShardedTensor):
            entry.dtype = weights[name].dtype
    try:
        loaded = library.load_dist_checkpoint(state, str(directory))
    except (library.CheckpointingException, RuntimeError, ValueError, KeyError) as exc:
        raise PlanError(f"{directory} does not fit the model: {exc}") from exc
    for name, tensor in weights.items():
        if loaded[name] is not tensor:
            tensor.copy_(loaded[name])
