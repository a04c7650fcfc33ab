"""What one of several FSDP2 ranks really holds of a built-in model, and what a plan says. No other rank is needed: the
process group is torch's fake one, which is why it has a process of its own."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from verl.planning import shapes
from verl.planning.job import Fabric, Hosts, Job
from verl.planning.shapes import planned_model
from verl.utils.builtin import builtin_model
from verl.workers.config import FSDPConfig
from verl.workers.engine.fsdp.fsdp2 import FSDP2Sharding
from verl.workers.engine.fsdp.weight_source import FSDPWeightSource
from verl.workers.engine.tensors import as_in_checkpoint


def main(pipe: Connection, name: str, rank: int, world: int) -> None:
    """Sends how many shards it has compared."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    directory = builtin_model(name)
    model, conversion = shapes._whole(shapes._config(directory)[0])
    sharding = FSDP2Sharding()
    held = sharding.held(sharding.shard(model, FSDPConfig(), torch.device("cpu")))
    source = FSDPWeightSource(as_in_checkpoint(held, conversion), rollout_dtype="bfloat16")
    planned = planned_model(
        directory,
        Job(
            trainers=Hosts(count=1, each=world),
            strategy="fsdp2",
            rollouts=Hosts(count=1, each=1),
            rollout_tp=1,
            fabric=Fabric(host_bytes_per_s=1.0),
        ),
    )
    assert list(source.specs()) == list(planned.layout.specs)
    table, specs = planned.held[rank], planned.layout.specs
    mine = {
        (specs[tensor].name, table.box(row, len(specs[tensor].shape)))
        for row, tensor in enumerate(table.tensor.tolist())
    }
    assert mine == {(shard.name, shard.box) for shard in source.shards()}
    pipe.send(len(mine))
