"""The state of a Megatron rank that an optimizer step changes, for checkpoints on disk and in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.workers.engine.megatron.build import BuiltModel
from verl.workers.engine.megatron.checkpoint import HeldInCheckpoint
from verl.workers.engine.megatron.optimizer import Optimizer
from verl.workers.engine.snapshots import Place, Places, State
from verl.workers.engine.tensors import HeldTensor


def on_disk(built: BuiltModel, optimizer: Optimizer | None, contents: Sequence[str]) -> dict[str, Any]:
    """The state that DCP writes and fills in place."""
    state: dict[str, Any] = {}
    if "model" in contents:
        state["model"] = _in_checkpoint(built.checkpointed)
    if "optimizer" in contents and optimizer is not None:
        moments = optimizer.moments()
        state["optimizer"] = {kind: _in_checkpoint(built.in_hf_names(own)) for kind, own in moments.items()}
        state["optimizer"]["step"] = torch.tensor(float(optimizer.steps))
    return state


def in_memory(built: BuiltModel, optimizer: Optimizer | None) -> State:
    """See `verl.workers.engine.snapshots.Rememberable`."""
    state = {f"model.{name}": tensor.detach() for name, tensor in built.weights.trained().items()}
    if optimizer is not None:
        state["optimizer.steps"] = torch.tensor(optimizer.steps)
        for kind, own in optimizer.moments().items():
            state |= {f"optimizer.{kind}.{name}": tensor for name, tensor in own.items()}
    return state


def places(built: BuiltModel, optimizer: Optimizer | None) -> Places:
    """The places of `in_memory`, without rows that pad the vocabulary."""
    kinds = {"model": built.weights.trained()}
    if optimizer is not None:
        kinds |= {f"optimizer.{kind}": own for kind, own in optimizer.moments().items()}
    return {
        f"{kind}.{tensor.name}": [Place(f"{kind}.{p.name}", p.box, p.local_box) for p in tensor.pieces]
        for kind, own in kinds.items()
        for tensor in built.layout.own
        if tensor.name in own
    }


def _in_checkpoint(tensors: dict[str, HeldTensor]) -> dict[str, HeldInCheckpoint]:
    return {name: HeldInCheckpoint(tensor) for name, tensor in tensors.items() if tensor.parts}
