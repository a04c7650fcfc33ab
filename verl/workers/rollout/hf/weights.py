"""Load a version from a node arena into a transformers model, whole or not at all as far as names and shapes go."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from verl.checkpoint_engine.errors import ActivationError
from verl.utils.experts import expert_matrices


def load_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor into the parameter or buffer of its name.

    Raises ActivationError, before anything is written, that lists every tensor that is missing, unexpected, or of
    another shape. A tied weight is present if any of its names is.
    """
    held = _as_in_checkpoint(model)
    loaded_storage = {held[name].data_ptr() for name in tensors if name in held}
    problems = [f"unexpected {name}" for name in tensors if name not in held]
    problems += [
        f"missing {name}"
        for name, tensor in held.items()
        if name not in tensors and tensor.data_ptr() not in loaded_storage
    ]
    problems += [
        f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(held[name].shape)}"
        for name, tensor in tensors.items()
        if name in held and tensor.shape != held[name].shape
    ]
    if problems:
        raise ActivationError(f"{len(problems)} tensors do not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, tensor in tensors.items():
            held[name].copy_(tensor)


def _as_in_checkpoint(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under the names of the checkpoint: of stacked experts, one view for each."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        matrices = expert_matrices(model.config.model_type, name, tensor.shape)
        held |= {one.name: tensor[one.expert, one.first : one.last] for one in matrices} or {name: tensor}
    return held
