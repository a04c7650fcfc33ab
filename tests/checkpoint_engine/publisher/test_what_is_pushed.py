"""What a publisher pushes is what the model holds at that push, whatever became of the model since it was made."""

from __future__ import annotations

import asyncio
import os
from asyncio import CancelledError
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.checkpoint_engine.fakes import arenas_in
from tests.checkpoint_engine.publisher.recorded import RecordedPublisher, is_loaded
from tests.workers.engine.rank_pool import RankPool
from verl.checkpoint_engine import ActivationError, CheckpointEngineError, SyncAborted
from verl.checkpoint_engine.memory.delta import warm_up


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of it would hold, tied weights once. Of a sharded model, on every rank."""
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if model.head.weight is model.embedding.weight:
        del state["head.weight"]
    return state


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assign_a_state(model: Tied) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)


def assign_a_parameter(model: Tied) -> None:
    model.layers[0].weight = nn.Parameter(torch.rand(4, 4))


def assign_a_buffer(model: Tied) -> None:
    model.layers[1].running_mean = torch.rand(4)


def assign_a_module(model: Tied) -> None:
    model.layers[0] = nn.Linear(4, 4)


def untie(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.embedding.weight.detach() * 2)


def resize(model: Tied) -> None:
    model.embedding = nn.Embedding(9, 4)
    model.head.weight = model.embedding.weight


def change_dtype(model: Tied) -> None:
    model.to(torch.bfloat16)


def add_a_layer(model: Tied) -> None:
    model.layers.append(nn.Linear(4, 4, bias=False))


def remove_a_layer(model: Tied) -> None:
    del model.layers[1]


CHANGES = [
    assign_a_state,
    assign_a_parameter,
    assign_a_buffer,
    assign_a_module,
    untie,
    resize,
    change_dtype,
    add_a_layer,
    remove_a_layer,
]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_push_sends_what_the_model_holds_by_then(change: Callable[[Tied], None], slots: int, shm: Path):
    model = Tied()
    with RecordedPublisher(model, config={"slots": slots}) as publisher:
        publisher.push(0)
        assert is_loaded(publisher.server, state_of(model))
        change(model)
        for version in (1, 2):
            assert publisher.push(version).retries == 0
            assert is_loaded(publisher.server, state_of(model))
        pending = publisher.push_async(3)
        assert pending.result().replicas_updated == (publisher.server.name,)
    assert arenas_in(shm) == []


OVER_GLOO = {"backend": "gloo", "engine_kwargs": {"gloo": {"interface": "lo"}}}


@pytest.mark.parametrize("config", [{"backend": "tcp"}, OVER_GLOO], ids=["tcp", "gloo"])
def test_deltas_lead_from_no_version_of_another_layout(config: dict[str, Any], shm: Path):
    warm_up()
    model = Tied()
    with RecordedPublisher(model, config=config | {"delta": "always"}) as publisher:
        for version, change in enumerate([change_nothing, assign_a_parameter, resize, change_dtype]):
            change(model)
            ways = []
            for pushed in (2 * version, 2 * version + 1):
                report = publisher.push(pushed)
                ways.append(report.delta.way if report.delta is not None else None)
                assert is_loaded(publisher.server, state_of(model))
                assert (report.retries, report.pieces_repaired) == (0, 0)
            assert ways[1] == "delta"


def change_nothing(model: Tied) -> None: ...


def test_a_server_is_asked_again_whether_the_weights_fit_once_they_are_others(shm: Path):
    model = Tied()
    with RecordedPublisher(model) as publisher:
        for version in (0, 1):
            publisher.push(version)
        assert publisher.server.log.count("check") == 1
        before = state_of(model)
        resize(model)
        publisher.server.refuses = ActivationError("embedding.weight [9, 4] is refused")
        with pytest.raises(ActivationError, match="is refused"):
            publisher.push(2)
        assert (publisher.server.version, publisher.server.paused) == (1, False)
        assert is_loaded(publisher.server, before)
        publisher.server.refuses = None
        publisher.push(3)
        assert publisher.server.checked["embedding.weight"] == ("float32", (9, 4))
        assert is_loaded(publisher.server, state_of(model))


@pytest.mark.parametrize("step", ["activate", "pause"])
def test_a_server_that_cannot_load_a_resized_model_serves_the_version_before_it(step: str, shm: Path):
    model = Tied()
    with RecordedPublisher(model) as publisher:
        publisher.push(0)
        before = state_of(model)
        resize(model)
        publisher.server.fail = fails_once_at(step)
        with pytest.raises(SyncAborted, match="the previous version stays in service"):
            publisher.push(1)
        assert (publisher.server.version, publisher.server.paused) == (0, False)
        assert is_loaded(publisher.server, before)
        publisher.push(2)
        assert is_loaded(publisher.server, state_of(model))


def fails_once_at(step: str) -> Callable[[str], None]:
    left = [step]

    def fail(now: str) -> None:
        if now in left:
            left.remove(now)
            raise ActivationError("told to fail")

    return fail


def test_a_push_leaves_the_models_memory_as_it_was_and_holds_none_of_it(shm: Path):
    model = Tied()
    with RecordedPublisher(model) as publisher:
        publisher.push(0)
        assert all(tensor.untyped_storage().resizable() for tensor in model.state_dict().values())
        gone = torch._C._storage_Use_Count(model.layers[0].weight.untyped_storage()._cdata)
        assert gone <= 2  # the parameter's, and that which is asked


# --- over ranks -------------------------------------------------------------------------------------------------------


def sharded(model: Tied) -> Tied:
    fully_shard(model.layers)
    fully_shard(model)
    return model


def evaluate(model: Tied) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.arange(4))
    model.train()


def train(model: Tied) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.arange(4)).square().mean().backward()
    optimizer.step()


def pushed_on_ranks(shm: str, made: str, *, is_async: bool = False) -> list[bool]:
    """Whether each push was what the model held, and training went on after it."""
    os.environ["VERL_SHM_DIR"] = shm
    torch.manual_seed(0)
    model = Tied()
    if made == "sharded later":
        publisher = RecordedPublisher(model)
        found = [push(publisher, model, 0, is_async=is_async)]
        sharded(model)
    else:
        sharded(model)
        if made == "after an evaluation":
            evaluate(model)
        publisher, found = RecordedPublisher(model), []
    with publisher:
        for version in range(1, 4):
            train(model)
            evaluate(model)
            found.append(push(publisher, model, version, is_async=is_async))
    return found


def push(publisher: RecordedPublisher, model: Tied, version: int, *, is_async: bool = False) -> bool:
    expected = state_of(model)
    if is_async:
        pending = publisher.push_async(version)
        evaluate(model)
        train(model)
        pending.result()
    else:
        publisher.push(version)
    return not publisher.is_first_rank or is_loaded(publisher.server, expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "beside training"])
@pytest.mark.parametrize("made", ["after an evaluation", "before it", "sharded later"])
def test_ranks_of_fsdp2_push_what_they_hold_and_train_on(made: str, is_async: bool, ranks: RankPool, shm: Path):
    assert (
        ranks.run(partial(pushed_on_ranks, is_async=is_async), 2, str(shm), made)
        == [[True] * (4 if made == "sharded later" else 3)] * 2
    )
    assert arenas_in(shm) == []


def divided(model: Tied, how: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("first", "second"))
    if how == "hybrid":
        fully_shard(model.layers, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    plan = {
        "layers.0": ColwiseParallel(output_layouts=Replicate()),
        "layers.2": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["second"], plan)
    return fully_shard(model, mesh=mesh["first"]) if how == "fsdp over tensor parallel" else model


def pushed_as_divided(shm: str, how: str) -> list[bool]:
    os.environ["VERL_SHM_DIR"] = shm
    torch.manual_seed(0)
    model = Tied()
    model.layers.append(nn.Linear(4, 4))
    divided(model, how)
    with RecordedPublisher(model) as publisher:
        found = [push(publisher, model, 0)]
        train(model)
        evaluate(model)
        return [*found, push(publisher, model, 1)]


@pytest.mark.parametrize("how", ["hybrid", "tensor parallel", "fsdp over tensor parallel"])
def test_ranks_push_what_they_hold_however_it_is_divided_among_them(how: str, ranks: RankPool, shm: Path):
    assert ranks.run(pushed_as_divided, 2, str(shm), how) == [[True, True]] * 2


def pushed_with_other_replicas(shm: str) -> dict[str, set[float]]:
    os.environ["VERL_SHM_DIR"] = shm
    model = nn.Sequential(nn.Linear(1500, 1500), nn.BatchNorm1d(1500))
    for tensor in model.state_dict().values():
        tensor.fill_(dist.get_rank())
    with RecordedPublisher(model) as publisher:
        publisher.push(0)
        return {name: {*tensor.unique().tolist()} for name, tensor in publisher.server.weights.items()}


def test_no_version_is_a_mixture_of_replicas_that_differ(ranks: RankPool, shm: Path):
    found, _ = ranks.run(pushed_with_other_replicas, 2, str(shm))
    assert found
    assert all(values == {0} for values in found.values())


def pushed_apart(shm: str) -> list[str]:
    os.environ["VERL_SHM_DIR"] = shm
    torch.manual_seed(0)
    model = sharded(Tied())
    said = []
    with RecordedPublisher(model, config={"retries": 3}) as publisher:
        publisher.push(1)
        with pytest.raises(SyncAborted) as caught:
            publisher.push(2 + dist.get_rank())
        said.append(str(caught.value))
        publisher.push(4)
        if dist.get_rank() == 1:
            del model.layers[1]
        with pytest.raises(Exception, match="describe another model than rank 0") as other:
            publisher.push(5)
        said.append(type(other.value).__name__)
    return said


def test_ranks_that_push_different_versions_or_models_are_told_both(ranks: RankPool, shm: Path):
    said: Any = ranks.run(pushed_apart, 2, str(shm))
    for versions, models in said:
        assert "this rank pushes version 3, and rank 0 version 2" in versions
        assert models == "PlanError"


def closed_alone(shm: str, first: int, has_pushed: bool) -> str:
    """What the other rank is told, which pushes after `first` has closed."""
    os.environ["VERL_SHM_DIR"] = shm
    publisher = RecordedPublisher({"w": torch.ones(3)})
    if has_pushed:
        publisher.push(1)
    said = ""
    if dist.get_rank() == first:
        publisher.close()
    dist.barrier()
    if dist.get_rank() != first:
        with pytest.raises(CheckpointEngineError) as caught:
            publisher.push(2)
        said = str(caught.value)
        publisher.close()
    dist.barrier()
    return said


@pytest.mark.parametrize("has_pushed", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_closes_without_the_others_which_are_told_when_they_push(
    first: int, has_pushed: bool, ranks: RankPool, shm: Path
):
    said = ranks.run(closed_alone, 2, str(shm), first, has_pushed)
    assert "a rank of this job does not answer: it has ended, closed its publisher, or does not push" in said[1 - first]
    assert arenas_in(shm) == []


def closed_while_pushing(shm: str, first: int) -> str:
    """How the push ends that hangs in a server, of which `first` closes its publisher first."""
    os.environ["VERL_SHM_DIR"] = shm
    publisher = RecordedPublisher({"w": torch.ones(3)})
    publisher.push(1)
    publisher.server.fail = lambda step: asyncio.Event().wait() if step == "activate" else None
    pending = publisher.push_async(2)
    for rank in (first, 1 - first):
        if dist.get_rank() == rank:
            publisher.close()
        dist.barrier()
    with pytest.raises((CheckpointEngineError, CancelledError)) as caught:
        pending.result()
    return type(caught.value).__name__


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_closes_during_a_push_waits_for_no_other(first: int, ranks: RankPool, shm: Path):
    assert ranks.run(closed_while_pushing, 2, str(shm), first) == ["CancelledError", "SyncAborted"]
    assert arenas_in(shm) == []


def pushed_late(shm: str) -> list[str]:
    """What a push says to which rank 1 comes when rank 0 has given up, and which version the next one is."""
    os.environ["VERL_SHM_DIR"] = shm
    with RecordedPublisher({"w": torch.ones(3)}) as publisher:
        publisher.push(1)
        object.__setattr__(publisher._settings.deadlines, "prepare_s", 0.5)
        found = []
        for rank in range(2):
            if dist.get_rank() == rank:
                with pytest.raises(CheckpointEngineError) as caught:
                    publisher.push(2)
                found.append(str(caught.value))
            dist.barrier()
        object.__setattr__(publisher._settings.deadlines, "prepare_s", 300.0)
        return [*found, str(publisher.push(3).version)]


def test_a_rank_that_pushes_too_late_is_told_and_the_next_push_is_one_again(ranks: RankPool, shm: Path):
    for told, version in ranks.run(pushed_late, 2, str(shm)):
        assert "trainer-1 not done within 0.5 s" in told
        assert version == "3"


class Unforeseen(Exception):
    """Cannot be made again from what it says, as pickle would."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")


def failing_on(shm: str, rank: int) -> str:
    """What this rank is told, of a push that fails on `rank`."""
    os.environ["VERL_SHM_DIR"] = shm

    async def fail(*_: object) -> None:
        raise Unforeseen("disk", "on fire")

    with RecordedPublisher({"w": torch.ones(3)}) as publisher:
        publisher.push(1)
        if dist.get_rank() == rank:
            (publisher if rank == 0 else publisher._member).__dict__["_take_in" if rank == 0 else "publish"] = fail
        with pytest.raises(Exception, match="on fire") as caught:
            publisher.push(2)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_every_rank_is_told_what_nobody_has_foreseen_on_another(ranks: RankPool, shm: Path):
    assert ranks.run(failing_on, 2, str(shm), 0) == [
        "Unforeseen: disk: on fire",
        "SyncAborted: [version 2, rank 0] Unforeseen: disk: on fire",
    ]
    for said in ranks.run(failing_on, 2, str(shm), 1):
        assert said.startswith("SyncAborted: [version 2, publish, trainer-1] ")
        assert said.endswith("Unforeseen: disk: on fire")
