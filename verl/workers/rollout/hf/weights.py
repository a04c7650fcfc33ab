"""Load a version from a node arena into a transformers model, after all names and shapes have been checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PretrainedConfig, PreTrainedModel

from verl.checkpoint_engine.errors import ActivationError
from verl.workers.hf.wrapped import conversion_between


def load_weights(model: PreTrainedModel, config: PretrainedConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor, under its checkpoint's name, into the parameters or buffers that it is a part of.

    `config` is that of the checkpoint, which may be a wrapper's: `model` takes what belongs to its language model.

    Raises ActivationError, before anything is written, that lists every tensor that is missing, unexpected, or of
    another shape. A tied weight is present if any of its names is; under two of them it has to be the same.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    conversion = conversion_between(model, config, shapes)
    problems = [f"unexpected {name}" for name in (*conversion.unexpected, *conversion.aside)]
    problems += [f"missing {name}" for name in conversion.missing]
    problems += conversion.misshapen
    problems += [
        f"{other} differs from {name}, which the model has in its place (tie_word_embeddings=true)"
        for other, name in conversion.copies.items()
        if tensors[other].dtype != tensors[name].dtype or not _same_bits(tensors[other], tensors[name])
    ]
    if problems:
        raise ActivationError(f"{len(problems)} tensors do not fit the model: " + "; ".join(problems))
    held = model.state_dict()
    with torch.no_grad():
        for name in conversion.shapes:
            for target, piece in conversion.parts_of(name):
                box = piece.origin_box
                values = tensors[name][tuple(map(slice, box.start, box.stop))]
                place = held[target][tuple(map(slice, piece.box.start, piece.box.stop))]
                place.copy_(piece.to_rearranged(values))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
