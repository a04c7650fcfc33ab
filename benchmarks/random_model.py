"""A model of a given size with random weights, as a checkpoint directory that every engine loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.checkpoint_engine.plan.types import TensorSpec
from verl.utils.builtin import make_tiny_model
from verl.workers.hf.checkpoint import HFCheckpoint

HIDDEN_SIZES = (2048, 1024, 512, 256, 128)
MIN_LAYERS = 8
MIN_MIB = 2


def make_random_model(directory: str | Path, size_mib: float) -> Path:
    """A Qwen2 of about `size_mib` MiB of bfloat16, which has a small vocabulary; returns the directory."""
    return make_tiny_model(directory, **_shape(int(size_mib * 2**20)), dtype="bfloat16", head_dim=64)


def _shape(nbytes: int) -> dict[str, Any]:
    def layer_nbytes(hidden: int) -> int:
        return 2 * (2 * hidden * hidden + 2 * 128 * hidden + 3 * 4 * hidden * hidden)

    hidden = next((size for size in HIDDEN_SIZES if MIN_LAYERS * layer_nbytes(size) <= nbytes), HIDDEN_SIZES[-1])
    layers = max(1, round(nbytes / layer_nbytes(hidden)))
    return {"hidden_size": hidden, "intermediate_size": 4 * hidden, "layers": layers}


def specs_of(model: Path) -> list[TensorSpec]:
    """Of a checkpoint, in bfloat16."""
    with HFCheckpoint(model) as checkpoint:
        names = sorted(checkpoint.names)
        return [TensorSpec(name=name, shape=checkpoint.shape(name), dtype="bfloat16") for name in names]
