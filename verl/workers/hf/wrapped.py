"""Convert the checkpoint of a multimodal wrapper for its language model alone."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PretrainedConfig, PreTrainedModel

from verl.checkpoint_engine.errors import PlanError
from verl.utils.language_model import auto_class, is_wrapper
from verl.workers.hf.conversion import Conversion, Shapes, conversion_of, first_names, listed_names


def conversion_between(
    model: PreTrainedModel, config: PretrainedConfig, shapes: Shapes, *, may_lack: Collection[str] = ()
) -> Conversion:
    """`conversion_of` for a checkpoint whose `config` may be that of a wrapper around `model`.

    transformers' rules are then those of the whole model, of which `model` has a part under shorter names. Other
    tensors are left aside, and may be missing. `may_lack` is for checkpoints of `model` alone.

    Raises PlanError for a wrapper in which `model` is not found.
    """
    if not is_wrapper(config):
        return conversion_of(model, shapes, may_lack=may_lack)
    with torch.device("meta"):
        whole: PreTrainedModel = auto_class(config).from_config(config)
    own_name = {theirs: own for own, theirs in _names_in(whole, model).items()}
    found = conversion_of(whole, shapes, may_lack=whole.state_dict().keys() - own_name.keys())
    pieces = {own_name[name]: own for name, own in found.pieces.items() if name in own_name}
    mine = {piece.origin for own in pieces.values() for piece in own}
    copies = {other: name for other, name in found.copies.items() if name in mine}
    aside = [name for name in shapes if name not in mine and name not in copies and name not in found.unexpected]
    return Conversion(
        model=type(model).__name__,
        pieces=pieces,
        shapes={name: shape for name, shape in found.shapes.items() if name in mine},
        copies=copies,
        aside=tuple(aside),
        missing=found.missing,
        unexpected=found.unexpected,
        misshapen=found.misshapen,
    )


def _names_in(whole: PreTrainedModel, model: PreTrainedModel) -> dict[str, str]:
    """By tensor of `model`: its name in `whole`. Tied ones once, under their first name."""
    own_start, their_start = _beginnings(whole, model)
    theirs, their_again, again = whole.state_dict(), first_names(whole), first_names(model)
    names, strangers = {}, []
    for name, tensor in model.state_dict().items():
        other = their_start + name.removeprefix(own_start) if name.startswith(own_start) else name
        if other not in theirs or theirs[other].shape != tensor.shape or (name in again) != (other in their_again):
            strangers.append(name)
        elif name not in again:
            names[name] = other
    if strangers:
        raise PlanError(
            f"{type(model).__name__} is not what {type(whole).__name__} has for a language model; other tensors: "
            f"{listed_names(strangers)}"
        )
    return names


def _beginnings(whole: PreTrainedModel, model: PreTrainedModel) -> tuple[str, str]:
    """How names in `model` begin, and the same ones in `whole`, which has the model with its head, or without."""
    for part, own_start in ((model, ""), (model.base_model, f"{model.base_model_prefix}.")):
        places = [name for name, module in whole.named_modules() if type(module) is type(part)]
        if len(places) == 1:
            return own_start, f"{places[0]}."
    raise PlanError(f"{type(whole).__name__} has no {type(model).__name__} in it")
