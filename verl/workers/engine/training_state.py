"""Training checkpoints by torch DCP, around the state of a model and its optimizer. Every function is a collective."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from verl.utils.config import ConfigError
from verl.utils.device import rng_state, seed_everything, set_rng_state
from verl.workers.engine.checkpoint_files import METADATA_FILE, read_metadata, read_state, write_state

logger = logging.getLogger(__name__)

RNG_KEY = "extra.rng"
LR_STEP_KEY = "extra.lr_step"
MAX_NAMES_IN_MESSAGE = 20

StateWriter = Callable[[Path, dict[str, Any]], None]
"""Writes a state to a directory, or begins to. A collective."""


@runtime_checkable
class SavesInBackground(Protocol):
    """A training engine that can write checkpoints while it trains on."""

    def begin_checkpoint(self, directory: Path, contents: Sequence[str], write: StateWriter) -> None:
        """As `save_checkpoint`, with `write` for the state of model, optimizer and extra. A collective.

        The state is borrowed: its values stay until the engine calls `before_step`.
        """


def write_now(directory: Path, state: dict[str, Any]) -> None:
    """A `StateWriter` that returns on every rank when all ranks have written."""
    if state:
        write_state(directory, state)
    dist.barrier()


def save_training_state(
    directory: Path,
    contents: Sequence[str],
    state: Callable[[Sequence[str]], dict[str, Any]],
    *,
    lr_step: int,
    device: str,
    write: StateWriter = write_now,
) -> None:
    """Write `state(contents)` and, if `contents` names it, `extra` (schedule position, RNG of every rank).

    Files are synced to disk when `write_now` returns. A caller that renames `directory` to its final name afterwards
    never leaves half a checkpoint behind.

    Raises ConfigError if `directory` holds a checkpoint already: files of another number of ranks would stay in it.
    Raises DiskFull, on every rank, if there is no room.
    """
    if (directory / METADATA_FILE).exists():
        raise ConfigError(f"{directory} already holds a checkpoint")
    saved = state(contents)
    if "extra" in contents:
        saved[LR_STEP_KEY] = torch.tensor(lr_step)
        saved |= {f"{RNG_KEY}.{dist.get_rank()}.{name}": value for name, value in rng_state(device).items()}
    write(directory, saved)


def load_training_state(
    directory: Path,
    contents: Sequence[str],
    state: Callable[[Sequence[str]], dict[str, Any]],
    *,
    device: str,
    seed: int,
) -> tuple[dict[str, Any], int | None]:
    """The inverse, with any number of ranks: fill `state(contents)`; return the schedule's step if `extra` is loaded.

    With another number of ranks than at the time of saving, generators cannot be restored and are reseeded from `seed`.
    Raises ConfigError if `directory` is not a checkpoint or lacks what `contents` names.
    """
    saved = frozenset(read_metadata(directory).state_dict_metadata)
    loaded = state(contents)
    if "extra" in contents:
        loaded[LR_STEP_KEY] = torch.tensor(0)
    if lacking := [part for part in loaded if not any(key == part or key.startswith(f"{part}.") for key in saved)]:
        raise ConfigError(f"checkpoint {directory} does not hold {', '.join(lacking)}; see checkpoint.load_contents")
    rng = _rng_template(saved, device) if "extra" in contents else {}
    if loaded:
        read_state(directory, loaded | rng)
    if LR_STEP_KEY not in loaded:
        return loaded, None
    lr_step = int(loaded.pop(LR_STEP_KEY))
    if rng:
        set_rng_state(device, {key.rsplit(".", 1)[1]: value for key, value in rng.items()})
    else:
        logger.warning("%s was saved by another number of ranks: random generators are reseeded", directory)
        seed_everything(seed + dist.get_rank() + lr_step)
    return loaded, lr_step


def require_same_tensors_in(directory: Path, own: Mapping[str, Sequence[int]]) -> None:
    """Raises ConfigError if `model` in a checkpoint is not made of the tensors `own`, by name and shape."""
    saved = shapes_in(directory)
    shapes = {name: tuple(shape) for name, shape in own.items()}
    if shapes and saved and shapes != saved:
        names = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
        raise ConfigError(
            f"checkpoint {directory} holds other tensors than this model trains (another model, or other adapters: see "
            f"model.lora_rank and model.target_modules): {', '.join(names[:MAX_NAMES_IN_MESSAGE])}"
        )


def shapes_in(directory: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors of `model` in a checkpoint, by name. No collective. Raises ConfigError if it is not complete."""
    return {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in read_metadata(directory).state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def _rng_template(saved: frozenset[str], device: str) -> dict[str, torch.Tensor]:
    """Tensors to load this rank's generators into; empty if the number of ranks or the device is another."""
    saved_ranks = sum(key.startswith(f"{RNG_KEY}.") and key.endswith(".cpu") for key in saved)
    template = {f"{RNG_KEY}.{dist.get_rank()}.{name}": value for name, value in rng_state(device).items()}
    return template if saved_ranks == dist.get_world_size() and saved.issuperset(template) else {}
