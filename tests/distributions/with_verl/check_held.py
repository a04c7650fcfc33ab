"""Tensors that verl gathers, and shards that stand for them. Run against the wheel: see `test_for_verl.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from verl_sync.errors import PlanError
from verl_sync.for_verl.held import Gathered, ShardedWeights, Shards


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"embed": torch.randn(10, 4, generator=made), "scale": torch.randn((), generator=made)}


def test_one_rank_holds_what_is_gathered_and_the_others_know_of_it():
    first, other = (Gathered(weights(1).items(), keeps=keeps, shards=None) for keeps in (True, False))
    assert first.specs() == other.specs()
    assert [shard.name for shard in first.shards()] == ["embed", "scale"]
    assert other.shards() == []
    for source in (first, other):
        source.gather(weights(2).items())
        source.refresh()  # as a publisher does before each version
    for shard in first.shards():
        values = torch.empty(weights(2)[shard.name].shape)
        first.copy(shard, values)
        assert torch.equal(values, weights(2)[shard.name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "not sent this time: scale"),
        ({"more": torch.ones(1)}, "more was not in the first version"),
        ({"embed": torch.ones(10, 5)}, r"embed, torch.float32 of shape \(10, 4\), is now .* \(10, 5\)"),
    ],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_version_of_another_model_is_refused_on_every_rank(
    keeps: bool, change: dict[str, torch.Tensor | None], message: str
):
    source = Gathered(weights(1).items(), keeps=keeps, shards=None)
    changed = {name: tensor for name, tensor in (weights(2) | change).items() if tensor is not None}
    with pytest.raises(PlanError, match=message):
        source.gather(changed.items())


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_shards_stand_for_what_is_gathered_in_another_dtype_and_follow_the_trainer():
    mesh = init_device_mesh("cpu", (1,))
    placed = {"embed": [Shard(0)], "scale": [Replicate()]}
    held = {name: distribute_tensor(tensor, mesh, placed[name]) for name, tensor in weights(1).items()}
    shards = Shards(lambda: {**held, "alias": held["embed"]})
    gathered = {name: tensor.to(torch.bfloat16) for name, tensor in weights(1).items()}
    Gathered(ShardedWeights(gathered.items(), dict), keeps=True, shards=shards)
    assert (shards.why_not, shards.dtype) == ("", "bfloat16")
    assert shards.tensors.keys() == gathered.keys()
    held["embed"] = distribute_tensor(weights(2)["embed"], mesh, [Shard(0)])
    shards.refresh()
    now = shards.tensors["embed"]
    assert isinstance(now, DTensor)
    assert torch.equal(now.full_tensor(), weights(2)["embed"])


@pytest.mark.parametrize(
    ("held", "why_not"),
    [
        ({"scale": weights(1)["scale"]}, "embed is not among the shards"),
        ({**weights(1), "embed": torch.ones(4, 10)}, "embed is not among the shards, or of another shape"),
        ({**weights(1), "scale": weights(2)["scale"]}, "scale is gathered with other values"),
    ],
)
def test_shards_that_are_something_else_do_not_stand_for_what_is_gathered(held: dict[str, torch.Tensor], why_not: str):
    shards = Shards(lambda: held)
    Gathered(weights(1).items(), keeps=False, shards=shards)
    assert why_not in shards.why_not


def test_several_dtypes_are_gathered_as_they_are_held_or_not_at_all():
    held = weights(1)
    for scale, why_not in ((torch.float32, ""), (torch.float16, "they are gathered in several dtypes")):
        shards = Shards(lambda: held)
        Gathered({**held, "scale": held["scale"].to(scale)}.items(), keeps=False, shards=shards)
        assert shards.why_not == why_not
