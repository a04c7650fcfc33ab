"""The parameters to which an optimizer applies weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from verl.workers.config.optim import OptimizerConfig


def decay_groups(
    named: Iterable[tuple[str, torch.Tensor]], config: OptimizerConfig, num_dims: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups of an AdamW, in the order of `named`: one, or one with and one without weight decay.

    With `decay_norms_and_biases=false` parameters that are named bias or have one dimension do not decay. `num_dims`:
    the dimensions of whole tensors, for ranks that hold flat parts.
    """
    decayed: list[torch.Tensor] = []
    spared: list[torch.Tensor] = []
    for name, tensor in named:
        is_vector = "bias" in name.rpartition(".")[2] or (num_dims[name] if num_dims else tensor.ndim) <= 1
        (spared if is_vector and not config.decay_norms_and_biases else decayed).append(tensor)
    groups = (decayed, config.weight_decay), (spared, 0.0)
    return [{"params": tensors, "weight_decay": decay} for tensors, decay in groups if tensors]
