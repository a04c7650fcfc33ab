"""Training checkpoints by torch DCP. Every function is a collective, on a model whose parameters are not gathered.

FSDP1 and FSDP2 write the same files: one continues from the other's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from verl.utils.config import ConfigError
from verl.utils.device import rng_state, seed_everything, set_rng_state
from verl.workers.engine.fsdp.mesh import replication_allowed

logger = logging.getLogger(__name__)

METADATA_FILE = ".metadata"
"""Written last by torch DCP: its presence says that the checkpoint is complete."""
MAX_NAMES_IN_MESSAGE = 20
RNG_KEY = "extra.rng"
LR_STEP_KEY = "extra.lr_step"


@replication_allowed()
def save_training_state(
    directory: Path,
    contents: Sequence[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    lr_step: int,
    device: str,
) -> None:
    """Write `model`, `optimizer` and `extra` (schedule position, RNG of every rank), those that `contents` names.

    Files are synced to disk when this returns; every rank returns only when all have written. A caller that renames
    `directory` to its final name afterwards never leaves half a checkpoint behind.

    Raises ConfigError if `directory` holds a checkpoint already: files of another number of ranks would stay in it.
    """
    if (directory / METADATA_FILE).exists():
        raise ConfigError(f"{directory} already holds a checkpoint")
    state = _model_state(contents, model, optimizer)
    if "extra" in contents:
        state[LR_STEP_KEY] = torch.tensor(lr_step)
        state |= {f"{RNG_KEY}.{dist.get_rank()}.{name}": value for name, value in rng_state(device).items()}
    if state:
        save(state, storage_writer=FileSystemWriter(directory, sync_files=True, overwrite=False))
    dist.barrier()


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

    With another number of ranks than at the time of saving, generators cannot be restored and are reseeded from `seed`.
    Raises ConfigError if `directory` is not a checkpoint or lacks what `contents` names.
    """
    saved = _saved_keys(directory)
    state = _model_state(contents, model, optimizer)
    if "extra" in contents:
        state[LR_STEP_KEY] = torch.tensor(0)
    if lacking := [part for part in state if not any(key == part or key.startswith(f"{part}.") for key in saved)]:
        raise ConfigError(f"checkpoint {directory} does not hold {', '.join(lacking)}; see checkpoint.load_contents")
    _require_same_tensors(directory, state.get("model", {}))
    rng = _rng_template(saved, device) if "extra" in contents else {}
    if state:
        load(state | rng, storage_reader=FileSystemReader(directory))
    if "model" in state:
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=not _has_frozen(model)))
    if "optimizer" in state and optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if LR_STEP_KEY not in state:
        return None
    lr_step = int(state[LR_STEP_KEY])
    if rng:
        set_rng_state(device, {key.rsplit(".", 1)[1]: value for key, value in rng.items()})
    else:
        logger.warning("%s was saved by another number of ranks: random generators are reseeded", directory)
        seed_everything(seed + dist.get_rank() + lr_step)
    return lr_step


def _model_state(contents: Sequence[str], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if "model" in contents:
        state["model"] = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=_has_frozen(model)))
    if "optimizer" in contents and optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def _has_frozen(model: nn.Module) -> bool:
    """What is frozen beside something that is trained is the base of adapters: the model's directory has it."""
    trained = [parameter.requires_grad for parameter in model.parameters()]
    return any(trained) and not all(trained)


def _require_same_tensors(directory: Path, model_state: Mapping[str, torch.Tensor]) -> None:
    saved = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in FileSystemReader(directory).read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    own = {name: tuple(tensor.shape) for name, tensor in model_state.items()}
    if own and own != saved:
        names = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        raise ConfigError(
            f"checkpoint {directory} holds other tensors than this model trains (another model, or other adapters: see "
            f"model.lora_rank and model.target_modules): {', '.join(names[:MAX_NAMES_IN_MESSAGE])}"
        )


def _saved_keys(directory: Path) -> frozenset[str]:
    if not (directory / METADATA_FILE).is_file():
        raise ConfigError(f"{directory} is not a training checkpoint: it has no {METADATA_FILE}")
    return frozenset(FileSystemReader(directory).read_metadata().state_dict_metadata)


def _rng_template(saved: frozenset[str], device: str) -> dict[str, torch.Tensor]:
    """Tensors to load this rank's generators into; empty if the number of ranks or the device is another."""
    saved_ranks = sum(key.startswith(f"{RNG_KEY}.") and key.endswith(".cpu") for key in saved)
    template = {f"{RNG_KEY}.{dist.get_rank()}.{name}": value for name, value in rng_state(device).items()}
    return template if saved_ranks == dist.get_world_size() and saved.issuperset(template) else {}
