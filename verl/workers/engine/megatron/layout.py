"""The parts of Hugging Face tensors that a Megatron rank holds, and their places. Pure arithmetic, without torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl.checkpoint_engine.plan.types import Box
from verl.workers.engine.megatron.architectures import (
    HEAD,
    TIED_HEAD,
    VALUE_HEAD,
    Architecture,
    Cut,
    Place,
    Row,
    architecture_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The dimensions of one model, under the names in the shapes of `Row`."""

    layers: int
    vocab: int
    padded_vocab: int
    hidden: int
    heads: int
    groups: int
    """The number of query groups: heads of k and of v."""
    head_dim: int
    ffn: int
    experts: int = 0
    expert_ffn: int = 0
    tied: bool = False
    labels: int = 0
    """Numbers per token of a value head; 0: the head gives scores of the vocabulary."""
    rank: int = 0
    """The rank of adapters."""

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.groups * self.head_dim

    @classmethod
    def of(cls, hf_config: Any, *, padded_vocab: int | None = None, labels: int = 0, rank: int = 0) -> Dimensions:
        """The dimensions of a Hugging Face config of a known architecture; with `labels` for a value head."""
        experts = (getattr(hf_config, "num_experts", 0) or 0) if architecture_of(hf_config.model_type).is_moe else 0
        return cls(
            layers=hf_config.num_hidden_layers,
            vocab=hf_config.vocab_size,
            padded_vocab=padded_vocab or hf_config.vocab_size,
            hidden=hf_config.hidden_size,
            heads=hf_config.num_attention_heads,
            groups=hf_config.num_key_value_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
            ffn=hf_config.intermediate_size,
            experts=experts,
            expert_ffn=hf_config.moe_intermediate_size if experts else 0,
            tied=bool(hf_config.tie_word_embeddings) and not labels,
            labels=labels,
            rank=rank,
        )

    def shape(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(int(getattr(self, name)) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place in each of Megatron's groups."""

    tensor: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Megatron's order of ranks, `tp-ep-dp-pp`: tensor-parallel ranks are neighbours, stages are furthest apart."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    """None: as many as the others."""
    counts_embedding: bool = False
    counts_loss: bool = False
    """Whether embedding and loss count as layers of the first and the last stage."""

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Ranks of one stage that hold the same experts."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    def of(self, rank: int) -> Coordinates:
        return Coordinates(
            tensor=rank % self.tensor,
            data=rank // self.tensor % self.data,
            pipeline=rank // (self.world // self.pipeline),
            expert=rank // self.expert_tensor % self.expert,
            expert_tensor=rank % self.expert_tensor,
        )

    def stages(self, layers: int) -> list[range] | None:
        """The layers of every stage; None if they cannot be divided."""
        stated = (self.first_stage_layers, self.last_stage_layers)
        if (self.counts_embedding or self.counts_loss) and stated != (None, None):
            return None
        if self.pipeline == 1:
            return [range(layers)] if stated == (None, None) else None
        if self.counts_embedding or self.counts_loss:
            return self._stages_that_count(layers)
        rest = layers - sum(size or 0 for size in stated)
        between = self.pipeline - sum(size is not None for size in stated)
        if rest < 0 or (rest % between if between else rest) or any(size is not None and size < 1 for size in stated):
            return None
        each = rest // between if between else 0
        sizes = [each] * self.pipeline
        sizes[0] = stated[0] or each
        sizes[-1] = stated[1] or each
        starts = [sum(sizes[:stage]) for stage in range(self.pipeline)]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)] if min(sizes) else None

    def _stages_that_count(self, layers: int) -> list[range] | None:
        """Equal stages of what counts, of which embedding and loss are no layers: a stage may have none."""
        counted = layers + self.counts_embedding + self.counts_loss
        each = counted // self.pipeline
        if counted % self.pipeline or not each:
            return None
        starts = [0, *(stage * each - self.counts_embedding for stage in range(1, self.pipeline)), layers]
        return [range(start, stop) for start, stop in itertools.pairwise(starts)]


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` of the Hugging Face tensor `name` is `local_box` of the parameter `local` of a rank's `GPTModel`."""

    name: str
    box: Box
    local: str
    local_box: Box


def rows_of(architecture: Architecture, dims: Dimensions) -> tuple[Row, ...]:
    if dims.labels:
        return (*architecture.rows, *VALUE_HEAD)
    return (*architecture.rows, TIED_HEAD if dims.tied else HEAD)


def tensor_shapes(architecture: Architecture, dims: Dimensions) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint; tied ones once. The same on every rank."""
    return {
        name.format(layer=layer, expert=expert): dims.shape(shape)
        for row in rows_of(architecture, dims)
        if row.place is not Place.LAST_COPY
        for layer, expert in itertools.product(
            range(dims.layers if row.place is Place.LAYER else 1), range(dims.experts if row.is_expert else 1)
        )
        for name, shape in row.hugging_face.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A parameter of a rank's `GPTModel`."""

    name: str
    row: Row
    pieces: tuple[Piece, ...]
    replicas: int
    """Ranks of the whole trainer that hold the same values."""
    is_tied: bool = False
    """The first stage's embedding is the last stage's head."""


def local_tensors(
    architecture: Architecture, dims: Dimensions, sizes: ParallelSizes, rank: int
) -> Iterator[LocalTensor]:
    """The local tensors of `rank`, in an order that depends on its stage."""
    place = sizes.of(rank)
    stages = sizes.stages(dims.layers)
    assert stages is not None  # checked before any process started
    is_first, is_last = place.pipeline == 0, place.pipeline == sizes.pipeline - 1
    here = {
        Place.FIRST: is_first,
        Place.LAYER: True,
        Place.LAST: is_last,
        Place.LAST_COPY: is_last and not is_first,
    }
    experts_each = dims.experts // sizes.expert
    own_experts = range(place.expert * experts_each, (place.expert + 1) * experts_each)
    for row in rows_of(architecture, dims):
        if not here[row.place]:
            continue
        layers = stages[place.pipeline] if row.place is Place.LAYER else range(1)
        experts = own_experts if row.is_expert else range(1)
        cut, of = (place.expert_tensor, sizes.expert_tensor) if row.is_expert else (place.tensor, sizes.tensor)
        for layer, expert in itertools.product(layers, experts):
            local = row.megatron.format(layer=layer - layers.start, expert=expert - experts.start)
            pieces = tuple(
                Piece(name.format(layer=layer, expert=expert), box, local, local_box)
                for name, box, local_box in _cut(row, dims, cut, of)
            )
            yield LocalTensor(
                name=local,
                row=row,
                pieces=pieces,
                replicas=_replicas(row, dims, sizes),
                is_tied=dims.tied and row.cut is Cut.VOCABULARY,
            )


def divide(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign each of `sizes`, in order, to the first rank with the least load; returns the ranks."""
    loads, found = [0] * ranks, []
    for size in sizes:
        rank = loads.index(min(loads))
        loads[rank] += size
        found.append(rank)
    return found


def _replicas(row: Row, dims: Dimensions, sizes: ParallelSizes) -> int:
    if row.is_expert:
        return sizes.expert_data
    copies = 2 if dims.tied and sizes.pipeline > 1 and row.cut is Cut.VOCABULARY else 1
    return sizes.data * copies * (sizes.tensor if row.cut is Cut.WHOLE else 1)


def _cut(row: Row, dims: Dimensions, rank: int, ranks: int) -> Iterator[tuple[str, Box, Box]]:
    """(Hugging Face name, box, local box) of tensor-parallel rank `rank` of `ranks`."""
    shapes = {name: dims.shape(shape) for name, shape in row.hugging_face.items()}
    if row.cut is Cut.QUERY_GROUPS:
        yield from _query_groups(shapes, dims, rank, ranks)
        return
    at = 0
    for name, shape in shapes.items():
        if row.cut is Cut.COLUMNS:
            width = shape[1] // ranks
            start = rank * width
            yield name, Box((0, start), (shape[0], start + width)), Box((0, 0), (shape[0], width))
            continue
        whole = dims.padded_vocab if row.cut is Cut.VOCABULARY else shape[0]
        size = whole if row.cut is Cut.WHOLE else whole // ranks
        start = 0 if row.cut is Cut.WHOLE else rank * size
        count = min(size, shape[0] - start)  # the last rows of a padded vocabulary are nobody's
        if count > 0:
            yield name, _rows(start, count, shape), _rows(at, count, shape)
        at += size


def _query_groups(
    shapes: dict[str, tuple[int, ...]], dims: Dimensions, rank: int, ranks: int
) -> Iterator[tuple[str, Box, Box]]:
    groups = dims.groups // ranks
    at = 0
    for group in range(rank * groups, (rank + 1) * groups):
        for name, shape in shapes.items():
            size = shape[0] // dims.groups
            yield name, _rows(group * size, size, shape), _rows(at, size, shape)
            at += size


def _rows(start: int, count: int, shape: tuple[int, ...]) -> Box:
    """`count` rows of a tensor like `shape`."""
    return Box((start, *(0 for _ in shape[1:])), (start + count, *shape[1:]))
