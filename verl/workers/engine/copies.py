"""Collectives of the ranks that compute on one copy of the model together, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from verl.protocol import DataProto, tensors_of


def gather_rows(data: DataProto, group: dist.ProcessGroup | None) -> tuple[DataProto, slice]:
    """Gather the rows of all ranks of `group`; returns them and the slice of this rank. None: a single rank.

    The driver gives every rank of the trainer an equal part of a batch. The ranks of one copy of the model join their
    parts and compute them together.
    """
    rows = len(data)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    if num_ranks == 1:
        return data, slice(0, rows)
    own = dist.get_rank(group)
    tensors: dict[str, torch.Tensor] = {}
    batch = tensors_of(data)
    for name in sorted(map(str, batch.keys())):
        tensor = batch[name].contiguous()
        parts = [torch.empty_like(tensor) for _ in range(num_ranks)]
        # As bytes: gloo knows no short integers.
        dist.all_gather([part.view(torch.uint8) for part in parts], tensor.view(torch.uint8), group=group)
        tensors[name] = torch.cat(parts)
    gathered = DataProto.from_dict(tensors=tensors, meta_info=data.meta_info)
    return gathered, slice(own * rows, (own + 1) * rows)


@contextmanager
def same_draws(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """In this block torch draws the same random numbers on all ranks of `group`; then each continues with its own.

    The first rank's next draw is the seed, so that a resumed run draws the same numbers.
    """
    if group is None:
        yield
        return
    seed = torch.randint(2**62, (1,))
    dist.broadcast(seed, group_src=0, group=group)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(int(seed))
        yield
