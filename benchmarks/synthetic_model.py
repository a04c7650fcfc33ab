"""A model of a given size with the tensor shapes of a Qwen2 checkpoint, and a trainer rank's rows of it."""

from __future__ import annotations

import functools

import torch

from verl.checkpoint_engine.memory.publishing import copy_values
from verl.checkpoint_engine.plan.types import ITEMSIZE, Box, Shard, TensorSpec

HIDDEN_SIZES = (8192, 5120, 3584, 2048, 1536, 896, 512, 256, 128, 64)
MIN_LAYERS = 8
SHARE_OF_LAYERS = 0.8
"""The rest of the bytes is the embedding, which gets as many rows as are left."""
MIN_NBYTES = 2**20


def qwen_like_specs(nbytes: int, dtype: str) -> list[TensorSpec]:
    """About `nbytes` of tensors: decoder layers and a tied embedding. Raises ValueError below `MIN_NBYTES`."""
    if nbytes < MIN_NBYTES:
        raise ValueError(f"a model of {nbytes} bytes is too small to have layers; the least is {MIN_NBYTES}")
    budget = SHARE_OF_LAYERS * nbytes
    hidden = next(
        (size for size in HIDDEN_SIZES if MIN_LAYERS * _nbytes(_layer(0, size, dtype)) <= budget), HIDDEN_SIZES[-1]
    )
    num_layers = max(1, int(budget / _nbytes(_layer(0, hidden, dtype))))
    specs = [spec for index in range(num_layers) for spec in _layer(index, hidden, dtype)]
    specs.append(TensorSpec(name="model.norm.weight", shape=(hidden,), dtype=dtype))
    rows = max(1, (nbytes - _nbytes(specs)) // (hidden * ITEMSIZE[dtype]))
    return [TensorSpec(name="model.embed_tokens.weight", shape=(rows, hidden), dtype=dtype), *specs]


def _layer(index: int, hidden: int, dtype: str) -> list[TensorSpec]:
    key_value, inner = max(hidden // 7, 16), hidden * 11 // 2
    shapes = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.k_proj.bias": (key_value,),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.v_proj.bias": (key_value,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return [TensorSpec(name=f"model.layers.{index}.{name}", shape=shape, dtype=dtype) for name, shape in shapes.items()]


def _nbytes(specs: list[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def rows_of(spec: TensorSpec, rank: int, world_size: int) -> Shard:
    """Those that FSDP2 gives a rank: chunks of equal size, the last ones smaller or empty."""
    chunk = -(-spec.shape[0] // world_size)
    first, last = min(rank * chunk, spec.shape[0]), min((rank + 1) * chunk, spec.shape[0])
    return Shard(spec.name, Box((first, *(0,) * (len(spec.shape) - 1)), (last, *spec.shape[1:])))


def row_sources(specs: list[TensorSpec], world_size: int, source_dtype: str) -> list[functools.partial[RowsOfModel]]:
    """What makes the sources of all ranks, each in its process."""
    return [functools.partial(RowsOfModel, specs, rank, world_size, source_dtype) for rank in range(world_size)]


class RankRows:
    """The weight source of one rank that holds a block of rows of every tensor, as FSDP2 shards a model."""

    def __init__(self, specs: list[TensorSpec], rank: int, world_size: int, source_dtype: str) -> None:
        """Rows are without values yet."""
        self._specs = specs
        self._shows_values = all(spec.dtype == source_dtype for spec in specs)
        self._boxes: dict[str, Box] = {}
        self._rows: dict[str, torch.Tensor] = {}
        for spec in specs:
            box = rows_of(spec, rank, world_size).box
            if box.numel:
                self._boxes[spec.name] = box
                self._rows[spec.name] = torch.empty(box.shape, dtype=getattr(torch, source_dtype))

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def shards(self) -> list[Shard]:
        return [Shard(name, box) for name, box in self._boxes.items()]

    def view(self, shard: Shard) -> torch.Tensor | None:
        values = self._values(shard)
        return values if self._shows_values and values.is_contiguous() else None

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        copy_values(destination, self._values(shard))

    def _values(self, shard: Shard) -> torch.Tensor:
        first = self._boxes[shard.name].start[0]
        rows = self._rows[shard.name][shard.box.start[0] - first : shard.box.stop[0] - first]
        return rows[(slice(None), *map(slice, shard.box.start[1:], shard.box.stop[1:]))]


class RowsOfModel(RankRows):
    """Rows with random numbers."""

    def __init__(self, specs: list[TensorSpec], rank: int, world_size: int, source_dtype: str) -> None:
        super().__init__(specs, rank, world_size, source_dtype)
        pattern = torch.randn(2**18, generator=torch.Generator().manual_seed(rank)).to(getattr(torch, source_dtype))
        for rows in self._rows.values():
            _tile(pattern, rows)

    def step(self) -> None:
        """Change every weight, as an optimizer would."""
        for rows in self._rows.values():
            rows.neg_()


def _tile(pattern: torch.Tensor, rows: torch.Tensor) -> None:
    """`pattern` over and over: random numbers for every element would take longer than the benchmark."""
    flat = rows.view(-1)
    for start in range(0, len(flat), len(pattern)):
        part = flat[start : start + len(pattern)]
        part.copy_(pattern[: len(part)])
