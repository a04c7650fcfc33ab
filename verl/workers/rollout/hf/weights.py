"""Load a version from a node arena into a transformers model, whole or not at all as far as names and shapes go."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from verl.checkpoint_engine.errors import ActivationError
from verl.workers.hf.conversion import conversion_of


def load_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor, under its checkpoint's name, into the parameters or buffers that it is a part of.

    Raises ActivationError, before anything is written, that lists every tensor that is missing, unexpected, or of
    another shape. A tied weight is present if any of its names is.
    """
    conversion = conversion_of(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    problems = [f"unexpected {name}" for name in (*conversion.unexpected, *conversion.aside)]
    problems += [f"missing {name}" for name in conversion.missing]
    problems += conversion.misshapen
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
