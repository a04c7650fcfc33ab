"""Check that the weights of a directory fit its configuration. The driver does so before any process starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from verl.compat.transformers import ignored_patterns
from verl.utils.config import ConfigError
from verl.utils.language_model import auto_class
from verl.utils.model_files import Tensors, require_whole_files, weight_tensors
from verl.utils.trainable import require_trainable
from verl.workers.hf.conversion import Conversion, conversion_of

SHOWN = 3
_OF_VALUES = re.compile(r"^(score|classifier)\.")
"""Names of layers in the place of the head."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def require_whole_model(directory: Path, key: str, config: Callable[[], PretrainedConfig], *, remote: bool) -> None:
    """Raises ConfigError, naming `key`, unless the files in `directory` are complete, and have the weights of the model
    whose configuration `config` reads. transformers alone would draw at random what they lack. `remote`: as for
    `require_fit`."""
    require_whole_files(directory, key)
    tensors = weight_tensors(directory, key)
    require_fit(config(), tensors, key, remote=remote)


def require_fit(config: PretrainedConfig, tensors: Tensors, key: str, *, remote: bool, needs_head: bool = True) -> None:
    """Raises ConfigError, naming `key`, if the weights lack a tensor of the model of `config`, or have others.

    `tensors` are those in the files. They are held against the model by transformers' own rules for
    loading it, as a trainer's engine does. `remote`: the model's own code may be run. Without `needs_head` they may be
    those of a critic, without the layer that foretells tokens. What cannot be trained by its kind is refused, see
    `require_trainable`.
    """
    require_trainable(config, key)
    model = _on_meta(config, key, remote=remote)
    shapes = {name: shape for name, (_, shape) in tensors.items()}
    found = conversion_of(model, shapes, may_lack=() if needs_head else _of_head_alone(model))
    stored = {name: tensors[name][0] for name in _of_numbers(model, found)}
    require_trainable(config, key, beside_model=(*found.unexpected, *found.aside), stored=stored)
    if values := [name for name in (*found.unexpected, *found.aside) if needs_head and _OF_VALUES.search(name)]:
        raise ConfigError(
            f"{key}: the weights are those of a critic or reward model ({values[0]}): give the policy's own directory"
        )
    problems = [
        *found.misshapen,
        *(f"{name} is not there" for name in found.missing),
        *(f"{name} is not in the config's model" for name in found.unexpected),
        *(f"{name} is not in the config's model" for name in _layers_beyond(found, ignored_patterns(model))),
    ]
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ConfigError(
            f"{key}: config.json, with overrides, does not fit the weights: {'; '.join(problems[:SHOWN])}{more}"
        )


def differences(
    config: PretrainedConfig, others: Mapping[str, tuple[int, ...]], key: str, *, remote: bool
) -> list[str]:
    """In what the model of `config` differs from one whose tensors have the shapes `others`, a clause for each tensor.

    Names that only one of them has count where both have such a tensor in another layer: a trainer may have more.
    """
    own = {name: tuple(tensor.shape) for name, tensor in _on_meta(config, key, remote=remote).state_dict().items()}
    shared = {_family(name) for name in own} & {_family(name) for name in others}
    return [
        *(
            f"{name} is {list(others[name])} there, {list(own[name])} here"
            for name in own
            if _differs(name, own, others)
        ),
        *(f"{name} is not here" for name in others if name not in own and _family(name) in shared),
        *(f"{name} is not there" for name in own if name not in others and _family(name) in shared),
    ]


def _differs(name: str, own: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]) -> bool:
    return name in others and own[name] != others[name]


def _on_meta(config: PretrainedConfig, key: str, *, remote: bool) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=remote)
    except Exception as exc:
        why = " ".join(f"{type(exc).__name__}: {exc}".split())
        if isinstance(exc, KeyError) and exc.args and (field := _field_of(config.to_dict(), exc.args[0])):
            why = f"transformers knows no {field}={exc.args[0]}"
        raise ConfigError(f"{key}: no model can be built of config.json: {why}") from exc
    return model


def _field_of(fields: Mapping[str, Any], value: Any) -> str | None:
    """The name of the one that has this value, or of one in it."""
    for name, own in fields.items():
        if isinstance(own, Mapping) and (inner := _field_of(own, value)):
            return f"{name}.{inner}"
        if isinstance(own, str) and own == value:
            return name
    return None


def _of_numbers(model: PreTrainedModel, found: Conversion) -> Iterator[str]:
    """Tensors of the files that floating-point numbers of the model are made of."""
    own = model.state_dict()
    for name, pieces in found.pieces.items():
        if own[name].is_floating_point():
            yield from (piece.origin for piece in pieces)


def _of_head_alone(model: PreTrainedModel) -> set[str]:
    """Parameters of the layer that foretells tokens; where it is the embedding, the bias at most."""
    layers: Any = model
    head, embedding = layers.get_output_embeddings(), layers.get_input_embeddings()
    own = set(map(id, head.parameters() if head else ())) - set(map(id, embedding.parameters()))
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def _layers_beyond(found: Conversion, ignored: list[str]) -> Iterator[str]:
    """Tensors of layers like those that the model has, of which it has fewer, and does not say that it leaves any."""
    used = {_family(name) for name in found.shapes}
    for name in found.aside:
        if _family(name) in used and not any(re.search(pattern, name) for pattern in ignored):
            yield name


def _family(name: str) -> str:
    """The name without the numbers of layers and experts."""
    return _NUMBER.sub("#", name)
