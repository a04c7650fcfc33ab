"""Make updates compute the same function as log-probs: disable dropout in a model of transformers.

A model in training mode drops activations, layers or choices of experts at random, and in evaluation mode it does not.
Old log-probs are computed in evaluation mode, so with dropout the ratio of the first update is not 1. Evaluation mode
for updates would do without, but gradient checkpointing works in training mode alone, and some models compute no
gradients in evaluation mode. So all random parts get probability 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from verl.utils.dropout import Path, is_random, none_of, random_fields

SAMPLING_ROUTERS = {"PhimoeTopKRouter": "router_jitter_noise"}
"""Classes that draw the experts of a token in training mode, and the field that they read in evaluation mode, too."""
CLIPPING = ("Gemma3nTextAltUp",)
"""Classes that clip their weights in training mode (`altup_coef_clip`): some for the call, some in what was gathered of
shards, which engines are not sent."""


def random_fields_of(config: PretrainedConfig) -> Iterator[tuple[Path, Any]]:
    """(path, value) of every field of `config`, and of those in it, that lets a model drop something."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from (((name, *path), inner) for path, inner in random_fields_of(value))
        elif config.model_type != "phimoe" or name not in SAMPLING_ROUTERS.values():
            yield from random_fields({name: value})


def set_fields(config: PretrainedConfig, fields: Iterable[tuple[Path, Any]]) -> None:
    for (*holders, name), value in fields:
        found: Any = config
        for holder in holders:
            found = found[holder] if isinstance(found, Mapping) else getattr(found, holder)
        if isinstance(found, Mapping):
            found[name] = value  # type: ignore[index]
        else:
            setattr(found, name, value)


def drop_nothing(config: PretrainedConfig) -> None:
    """Set every such field of `config` to 0, in place. `set_fields` with what `random_fields_of` gave undoes it."""
    set_fields(config, [(path, none_of(value)) for path, value in random_fields_of(config)])


def silence(model: nn.Module) -> None:
    """Set to 0 the dropout of modules that ignore the configuration of `model`, such as heads with own defaults."""
    for module in model.modules():
        names = [name for name in vars(module) if "drop" in name]
        if "dropout" in type(module).__name__.lower():
            names.append("p")
        for name in names:
            value = getattr(module, name, None)
            if is_random("drop", value):
                setattr(module, name, none_of(value))


def train(model: nn.Module, *, drops: bool) -> None:
    """Put `model` in training mode; unless `drops`, except modules that compute something else in that mode."""
    model.train()
    if not drops:
        for module in model.modules():
            if type(module).__name__ in (*SAMPLING_ROUTERS, *CLIPPING):
                module.training = False
