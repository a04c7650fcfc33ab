"""What every rank holds of random models that torch itself shards: all ranks play in this process, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.workers.config import FSDPConfig
from verl.workers.engine.fsdp.fsdp1 import FSDP1Sharding
from verl.workers.engine.fsdp.fsdp2 import FSDP2Sharding
from verl.workers.engine.fsdp.weight_source import FSDPWeightSource
from verl.workers.engine.tensors import as_in_checkpoint, named_parameters
from verl.workers.hf.conversion import Conversion
from verl.workers.hf.rearranged import Rearranged

Shape = tuple[int, ...]


class Layer(nn.Module):
    """Tensors of its own, and stacked experts: so many, of so many rows and columns."""

    def __init__(self, shapes: list[Shape], experts: Shape) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.empty(shape) for shape in shapes])
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        number, rows, columns = experts
        self.mlp.experts.gate_up_proj = nn.Parameter(torch.empty(number, 2 * rows, columns))
        self.mlp.experts.down_proj = nn.Parameter(torch.empty(number, columns, rows))


class Model(nn.Module):
    """Layers, and tensors of its own, one of which is tied and one a buffer."""

    _no_split_modules = ("Layer",)

    def __init__(self, own: list[Shape], layers: list[tuple[list[Shape], Shape]]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Module(), nn.Module()
        self.embedding.weight = self.head.weight = nn.Parameter(torch.empty(own[0]))
        self.layers = nn.ModuleList(Layer(shapes, experts) for shapes, experts in layers)
        self.rest = nn.ParameterList([torch.empty(shape) for shape in own[1:]])
        self.register_buffer("count", torch.empty(2, 3))


SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)
EXPERTS = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
MODELS = st.tuples(
    st.lists(SHAPES, min_size=1, max_size=3),
    st.lists(st.tuples(st.lists(SHAPES, min_size=1, max_size=4), EXPERTS), max_size=3),
)
WORLDS = st.sampled_from([(world, size) for world in range(1, 9) for size in range(1, world + 1) if world % size == 0])
"""(ranks, ranks that share one copy)."""


@contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a group in which nobody answers, and nobody is asked."""
    _clear_sharding_prop_cache()  # it remembers which rank this process was
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def source_of(rank, world_size, fsdp_size, sharding, description, values) -> FSDPWeightSource:
    """The source of a rank whose shards hold their part of `values`."""
    with playing(rank, world_size):
        with torch.device("meta"):
            model = Model(*description)
        conversion = stacked_experts(model)
        model = sharding.shard(model, FSDPConfig(dtype="float32", fsdp_size=fsdp_size), torch.device("cpu"))
        with torch.no_grad():
            for name, tensor in as_in_checkpoint(sharding.held(model), conversion).items():
                whole = values.setdefault(name, fresh(tensor.shape, values))
                for part in tensor.parts:
                    part.values().copy_(whole[tuple(map(slice, part.box.start, part.box.stop))])
        return FSDPWeightSource(as_in_checkpoint(sharding.held(model), conversion), rollout_dtype="float32")


def stacked_experts(model: nn.Module) -> Conversion:
    """The checkpoint has the experts one by one, the model has them stacked."""
    pieces, shapes = {}, {}
    for name, parameter in named_parameters(model):
        halves = 1 + name.endswith(".gate_up_proj")
        if ".experts." not in name:
            made, own = Rearranged.of(name, parameter.shape), {name: tuple(parameter.shape)}
        else:
            number, rows, columns = parameter.shape
            own = {f"{name}.{h}.{n}": (rows // halves, columns) for h in range(halves) for n in range(number)}
            each = [Rearranged.of(matrix, shape) for matrix, shape in own.items()]
            stacks = [torch.stack(each[half * number : (half + 1) * number]) for half in range(halves)]
            made = torch.cat(stacks, dim=1)
        pieces[name] = made.pieces
        shapes |= own
    return Conversion(model="Model", pieces=pieces, shapes=shapes, copies={}, aside=())


def fresh(shape: Shape, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Numbers that no other tensor has."""
    first = sum(tensor.numel() for tensor in values.values())
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("sharding", [FSDP1Sharding(), FSDP2Sharding()], ids=["fsdp", "fsdp2"])
@settings(deadline=None, max_examples=40, phases=[Phase.generate])
@given(description=MODELS, world=WORLDS, block_nbytes=st.sampled_from([4, 60, 10_000]))
def test_the_planned_pieces_of_all_ranks_are_the_model_with_every_element_once(
    sharding, description, world, block_nbytes
):
    values: dict[str, torch.Tensor] = {}
    sources = [source_of(rank, *world, sharding, description, values) for rank in range(world[0])]
    assert len({tuple(source.specs()) for source in sources}) == 1
    layout = Layout.of(sources[0].specs())
    held = [ShardTable.of(layout, source.shards()) for source in sources]
    plan = make_plan(layout, held, block_nbytes=block_nbytes)

    copied = {spec.name: torch.full(spec.shape, float("nan")) for spec in sources[0].specs()}
    times = {name: torch.zeros_like(tensor) for name, tensor in copied.items()}
    for owner, source in enumerate(sources):
        for shard in plan.shards_of(owner):
            part = tuple(map(slice, shard.box.start, shard.box.stop))
            source.copy(shard, copied[shard.name][part])
            times[shard.name][part] += 1
    for name, tensor in copied.items():
        assert bool((times[name] == 1).all()), name
        assert torch.equal(tensor, values[name]), name
    sent = plan.owner_nbytes
    assert sum(sent) == layout.payload_nbytes
