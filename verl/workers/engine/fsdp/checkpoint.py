"""Training checkpoints by torch DCP. Every function is a collective, on a model whose parameters are not gathered.

FSDP1 and FSDP2 write the same files: one continues from the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from verl.workers.engine import training_state
from verl.workers.engine.adapters import has_adapters
from verl.workers.engine.fsdp.mesh import replication_allowed
from verl.workers.engine.training_state import require_same_tensors_in


@replication_allowed()
def save_training_state(
    directory: Path,
    contents: Sequence[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    lr_step: int,
    device: str,
    write: training_state.StateWriter = training_state.write_now,
) -> None:
    """Write `model`, `optimizer` and `extra`, those that `contents` names. See `training_state.save_training_state`."""
    training_state.save_training_state(
        directory,
        contents,
        lambda parts: _model_state(parts, model, optimizer),
        lr_step=lr_step,
        device=device,
        write=write,
    )


@replication_allowed()
def load_training_state(
    directory: Path,
    contents: Sequence[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: str,
    seed: int,
) -> int | None:
    """The inverse of `save_training_state`, with any number of ranks. Returns the schedule's step if `extra` is loaded.

    Raises ConfigError if `directory` is not a checkpoint, lacks what `contents` names, or is that of another model.
    """

    def own(parts: Sequence[str]) -> dict[str, Any]:
        state = _model_state(parts, model, optimizer)
        require_same_tensors_in(directory, {name: tensor.shape for name, tensor in state.get("model", {}).items()})
        return state

    state, lr_step = training_state.load_training_state(directory, contents, own, device=device, seed=seed)
    if "model" in state:
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=not has_adapters(model)))
    if "optimizer" in state and optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return lr_step


def _model_state(contents: Sequence[str], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if "model" in contents:
        state["model"] = get_model_state_dict(model)
    if "optimizer" in contents and optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state
