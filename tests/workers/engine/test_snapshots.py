"""Engines that are built anew go on from a snapshot bit for bit, and one has the same names at any time."""

from __future__ import annotations

import pytest
import torch

from tests.workers.engine.engine_cases import held_parts, make_engine
from tests.workers.engine.megatron_cases import make_megatron
from tests.workers.engine.megatron_cases import train as train_megatron
from tests.workers.engine.test_fsdp_checkpoint import OPTIM, train

LORA = {"model": {"lora_rank": 2, "target_modules": ["q_proj", "down_proj"]}}
DISTRIBUTED = {"tensor_model_parallel_size": 1, "use_distributed_optimizer": True}


def fsdp(path, options):
    return make_engine(path, optim=OPTIM, **options), lambda engine, seeds: train(engine, seeds[0], len(seeds))


def megatron(path, options):
    return make_megatron(path, options), train_megatron


def described(state):
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


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
    return {
        "names": first == described(kept),
        "weights": all(torch.equal(one[2], other[2]) for one, other in parts),
        "state": all(torch.equal(one, other) for one, other in states),
        "trained": not all(
            torch.equal(one[2], other[2]) for one, other in zip(restored, held_parts(again), strict=True)
        ),
    }


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (fsdp, {}),
        (fsdp, {"strategy": "fsdp"}),
        (fsdp, LORA),
        (megatron, {"tensor_model_parallel_size": 2}),
        (megatron, DISTRIBUTED),
    ],
    ids=["fsdp2", "fsdp", "adapters", "megatron", "distributed optimizer"],
)
def test_an_engine_goes_on_from_a_snapshot_bit_for_bit(ranks, models, make, options):
    path = models("qwen2", True)
    for found in ranks.run(go_on_twice, 2, make, path, options):
        assert found == {"names": True, "weights": True, "state": True, "trained": True}
