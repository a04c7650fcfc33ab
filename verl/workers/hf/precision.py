"""Find tensors that must not be rounded to the dtype of the others, in the trainer or in a sync."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from verl.compat.transformers import names_kept_in_float32
from verl.utils.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl.workers.hf.checkpoint import HFCheckpoint
    from verl.workers.hf.conversion import Conversion

MAX_NAMES_IN_MESSAGE = 8


def require_precision(names: Iterable[str], checkpoint: HFCheckpoint, dtype: torch.dtype) -> None:
    """Raises ConfigError if `dtype` would round tensors that the checkpoint keeps wider than the others."""
    common = checkpoint.common_dtype()
    if dtype.itemsize >= 4 or common.itemsize >= 4:  # nothing is rounded, or all of it, as was asked for
        return
    wide = [name for name in names if _is_wide(checkpoint.dtype(name), dtype)]
    if wide:
        raise ConfigError(
            f"fsdp_config.model_dtype={str(dtype).removeprefix('torch.')} would round {len(wide)} tensors that the "
            f"checkpoint keeps in float32 among {str(common).removeprefix('torch.')} ones: "
            f"{', '.join(wide[:MAX_NAMES_IN_MESSAGE])}; set fsdp_config.model_dtype=fp32"
        )


def names_kept_wide(shapes: Mapping[str, tuple[int, ...]], checkpoint: HFCheckpoint) -> frozenset[str]:
    """The tensors of `shapes` to which `rollout.dtype` does not apply: engines get them in the trainer's dtype.

    Tensors that the checkpoint keeps wider than its others, and vectors that are neither weight nor bias of a layer
    (corrections of routers, decays and steps of state-space layers): engines keep those in float32 for themselves. An
    engine that keeps one of them narrower rounds it, with the same result.
    """
    common = checkpoint.common_dtype()
    return frozenset(
        name
        for name, shape in shapes.items()
        if (name in checkpoint.names and _is_wide(checkpoint.dtype(name), common))
        or (sum(size > 1 for size in shape) < 2 and name.rpartition(".")[2] not in ("weight", "bias"))
    )


def names_kept_by_transformers(model: PreTrainedModel, conversion: Conversion) -> frozenset[str]:
    """Tensors of the checkpoint that transformers keeps in float32 for every dtype of the model."""
    modules = names_kept_in_float32(model)
    patterns = [re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in modules]
    return frozenset(
        name
        for name in conversion.shapes
        if any(pattern.search(target) for target, _ in conversion.parts_of(name) for pattern in patterns)
    )


def _is_wide(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > other.itemsize
