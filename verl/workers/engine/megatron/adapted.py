"""The LoRA adapters of Megatron's linear layers, and how ranks divide them. Pure: the driver calls it, too.

Of x W', (B A) scale is added to W. Where a tensor-parallel rank has rows of W it has the same rows of B and all of A;
where it has columns, the same columns of A and all of B. So it can add its part without another rank. A layer of
Megatron's that is made of several Hugging Face layers has as many adapters, which lie in one A and one B as the weights
lie in one W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from verl.utils.config import ConfigError
from verl.workers.config import HFModelConfig
from verl.workers.engine.adapters import KEY, A, B
from verl.workers.engine.fsdp.model import adapter_shapes
from verl.workers.engine.megatron.architectures import Architecture, Cut, Row, architecture_of

NAMES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Names of `target_modules` in Megatron and its bridge to Hugging Face."""
WEIGHT = ".weight"
CUTS = (Cut.ROWS, Cut.COLUMNS, Cut.QUERY_GROUPS)
"""The cuts of linear layers."""


def with_adapters(config: HFModelConfig, hf_config: Any) -> tuple[Architecture, dict[str, tuple[int, ...]]]:
    """The architecture of the model with the adapters that `config` asks for, and their shapes in the model's order.

    Raises ConfigError or BackendUnavailable, as `adapter_shapes` does, and for what has adapters with FSDP2 alone.
    """
    shapes = adapter_shapes(in_hugging_face_names(config, hf_config.model_type))
    layers = {name.removesuffix(A) for name in shapes if name.endswith(A)}
    return _with_rows(architecture_of(hf_config.model_type), layers, hf_config.num_hidden_layers), shapes


def in_hugging_face_names(config: HFModelConfig, model_type: str) -> HFModelConfig:
    """`config` with Megatron's names in `target_modules` replaced by Hugging Face's.

    Raises ConfigError for layers of experts.
    """
    if isinstance(config.target_modules, str):
        return config
    if architecture_of(model_type).is_moe:
        experts = [name for name in config.target_modules if name.startswith("linear_fc")]
        if experts:
            raise ConfigError(
                f"{KEY}.target_modules={config.target_modules}: {', '.join(experts)} of {model_type} are experts, "
                "which cannot have adapters: leave them out"
            )
    names = [own for name in config.target_modules for own in NAMES.get(name, (name,))]
    return replace(config, target_modules=list(dict.fromkeys(names)))


def _with_rows(architecture: Architecture, layers: set[str], num_layers: int) -> Architecture:
    """`layers` are Hugging Face's names of linear layers.

    Raises ConfigError for a layer that is in no map, and if not all of the `num_layers` blocks have the same adapters.
    """
    rows: list[Row] = []
    known: set[str] = set()
    for row in architecture.rows:
        rows.append(row)
        if row.is_expert or row.cut not in CUTS:
            continue
        of_row = {name: set(_in_blocks(name, num_layers)) for name in row.hugging_face if name.endswith(WEIGHT)}
        partly = [name for name, every in of_row.items() if not every.isdisjoint(layers) and not every <= layers]
        if partly:
            raise ConfigError(
                f"{KEY}.target_modules names {', '.join(name.removesuffix(WEIGHT) for name in partly)} of some blocks "
                "and not of others: with strategy=megatron all blocks have the same adapters"
            )
        rows += _of(row, [name for name, every in of_row.items() if every <= layers])
        known.update(*of_row.values())
    if unknown := sorted(layers - known):
        raise ConfigError(f"{KEY}.target_modules: strategy=megatron has no adapters for {', '.join(unknown)}")
    return replace(architecture, rows=tuple(rows))


def _in_blocks(name: str, num_layers: int) -> Iterator[str]:
    return (name.removesuffix(WEIGHT).format(layer=layer) for layer in range(num_layers))


def _of(row: Row, names: list[str]) -> tuple[Row, ...]:
    """A and B of the layers `names`, which lie in `row`."""
    if not names:
        return ()
    prefix, by_columns = row.megatron.removesuffix("weight"), row.cut is Cut.COLUMNS
    shapes = {name.removesuffix(WEIGHT): row.hugging_face[name] for name in names}
    return (
        Row(
            megatron=f"{prefix}adapter.a",
            hugging_face={layer + A: ("rank", inputs) for layer, (_, inputs) in shapes.items()},
            cut=Cut.COLUMNS if by_columns else Cut.WHOLE,
            is_adapter=True,
        ),
        Row(
            megatron=f"{prefix}adapter.b",
            hugging_face={layer + B: (outputs, "rank") for layer, (outputs, _) in shapes.items()},
            cut=Cut.WHOLE if by_columns else row.cut,
            is_adapter=True,
        ),
    )
