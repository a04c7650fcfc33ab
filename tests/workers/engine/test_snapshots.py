"""Engines that are built anew go on from a snapshot bit for bit, and one has the same names at any time.

Another number of ranks takes from snapshots what it would take from a checkpoint on disk.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch.distributed as dist

from tests.workers.engine.engine_cases import held_parts, make_engine
from tests.workers.engine.megatron_cases import make_megatron
from tests.workers.engine.megatron_cases import train as train_megatron
from tests.workers.engine.test_fsdp_checkpoint import CONTENTS, OPTIM, train
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.memory_checkpoint.keeper import StateKeeper
from verl.workers.memory_checkpoint.rank import RankMemory
from verl.workers.memory_checkpoint.resharded import Left, Resharded, StateDescription

HOST = "127.0.0.1"
LORA = {"model": {"lora_rank": 2, "target_modules": ["q_proj", "down_proj"]}}
DISTRIBUTED = {"tensor_model_parallel_size": 1, "use_distributed_optimizer": True}


def fsdp(path, options):
    return make_engine(path, optim=OPTIM, **options), lambda engine, seeds: train(engine, seeds[0], len(seeds))


def megatron(path, options):
    return make_megatron(path, options), train_megatron


def described(state):
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def optimizer_states(engine):
    """Of parameters of which this rank has nothing, too: a checkpoint may take the number of steps from any rank."""
    return engine.optimizer.state.values() if isinstance(engine, FSDPEngine) else ()


def go_on_twice(make, path, options):
    """What two steps after a snapshot make, of the engine that went on, and of one that was built anew."""
    engine, train_on = make(path, options)
    first = described(engine.snapshot())
    train_on(engine, (0, 1))
    kept = {name: tensor.clone() for name, tensor in engine.snapshot().items()}
    train_on(engine, (2, 3))
    again, _ = make(path, options)
    again.restore(kept)
    restored = held_parts(again)
    train_on(again, (2, 3))
    parts = zip(held_parts(engine), held_parts(again), strict=True)
    states = zip(engine.snapshot().values(), again.snapshot().values(), strict=True)
    steps = [state["step"].item() for made in (engine, again) for state in optimizer_states(made)]
    return {
        "steps": set(steps),
        "names": first == described(kept),
        "weights": all(torch.equal(one[2], other[2]) for one, other in parts),
        "state": all(torch.equal(one, other) for one, other in states),
        "trained": not all(
            torch.equal(one[2], other[2]) for one, other in zip(restored, held_parts(again), strict=True)
        ),
    }


@pytest.mark.parametrize(
    ("make", "options", "number"),
    [
        (fsdp, {}, 3),
        (fsdp, {"strategy": "fsdp"}, 3),
        (fsdp, LORA, 2),
        (megatron, {"tensor_model_parallel_size": 2}, 2),
        (megatron, DISTRIBUTED, 2),
    ],
    ids=["fsdp2", "fsdp", "adapters", "megatron", "distributed optimizer"],
)
def test_an_engine_goes_on_from_a_snapshot_bit_for_bit(ranks, models, make, options, number):
    """Of three ranks the last has nothing of some parameters."""
    path = models("qwen3" if number == 3 else "qwen2", True)
    for found in ranks.run(go_on_twice, number, make, path, options):
        assert found.pop("steps") == ({4.0} if make is fsdp else set())
        assert found == {"names": True, "weights": True, "state": True, "trained": True}


def leave(make, path, options, directory):
    """Train, and save to disk what is returned, too."""
    engine, train_on = make(path, options)
    train_on(engine, (0, 1))
    engine.save_checkpoint(directory, CONTENTS)
    return {name: tensor.clone() for name, tensor in engine.snapshot().items()}, engine.places()


def take(make, path, options, directory, left):
    """What is taken from memory, what is not as on disk, and what training makes of both."""
    engine, train_on = make(path, options)
    with Resharded(engine.snapshot(), engine.places(), left, host=HOST) as saved:
        saved.check()
        engine.restore(saved)
    other, _ = make(path, options)
    other.load_checkpoint(directory, CONTENTS)
    taken, loaded = engine.snapshot(), other.snapshot()
    differ = {name for name, tensor in taken.items() if not torch.equal(tensor, loaded[name])}
    dist.barrier()
    train_on(engine, (2, 3))
    train_on(other, (2, 3))
    parts = zip(held_parts(engine), held_parts(other), strict=True)
    return set(taken), set(loaded), differ, all(torch.equal(one[2], same[2]) for one, same in parts)


@pytest.fixture
def kept(tmp_path):
    """Keeps what ranks have left, and tells where others can read it."""
    keeper = StateKeeper(job="test", shm_dir=str(tmp_path))

    def keep(states):
        memories = [RankMemory(lambda state=state: state) for state, _ in states]
        keeper.reserve({rank: memory.plan.encode() for rank, memory in enumerate(memories)})
        slots, digests = keeper.begin(2), {}
        for rank, memory in enumerate(memories):
            memory.begin_copy(slots[rank])
            digests[rank] = asyncio.run(memory.copied())
        keeper.commit(2, digests)
        lent = keeper.lend(2, range(len(states)), to=[HOST])
        return [
            Left(lent.wire, lent.places[rank][0], lent.digests[rank], StateDescription(memory.plan.encode(), places))
            for (rank, memory), (_, places) in zip(enumerate(memories), states, strict=True)
        ]

    yield keep
    keeper.close()


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("make", "options", "number", "others"),
    [
        (fsdp, ({}, {}), 3, 2),
        (fsdp, ({}, {}), 2, 1),
        (fsdp, ({"strategy": "fsdp"}, {"strategy": "fsdp"}), 3, 2),
        (fsdp, ({"strategy": "fsdp"}, {"strategy": "fsdp"}), 2, 1),
        (fsdp, (LORA, LORA), 2, 3),
        (megatron, (DISTRIBUTED, DISTRIBUTED), 3, 2),
        (megatron, (TP2, {}), 2, 1),
        (megatron, (PP2, TP2), 4, 2),
    ],
    ids=["fsdp2 3-2", "fsdp2 2-1", "fsdp 3-2", "fsdp 2-1", "adapters 2-3", "moments 3-2", "tensor", "pipeline"],
)
def test_another_number_of_ranks_takes_from_memory_what_is_on_disk(
    ranks, models, kept, tmp_path, make, options, number, others
):
    path, directory = models("qwen3", make is fsdp), tmp_path / "step"
    left = kept(ranks.run(leave, number, make, path, options[0], directory))
    for names, same, differ, goes_on in ranks.run(take, others, make, path, options[1], directory, left):
        assert names == same
        assert not differ
        assert goes_on
