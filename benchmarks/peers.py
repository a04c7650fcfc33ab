"""What frameworks do without a checkpoint engine, on the same bytes: the other side of `benchmarks.weight_sync`.

    gathered broadcast    ranks gather every tensor; rank 0 broadcasts it to the nodes, tensor by tensor
    safetensors in shm    ranks gather every tensor; rank 0 saves all in shared memory, every node loads the file
    ray object store      every rank puts its rows; every node gets and assembles them

Every way starts with the same rows in the ranks' processes and ends with whole tensors in private memory of every
node's process. Nodes then digest what they have, which is compared with the ranks' own digests and is not timed.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks.free_ports import free_port
from benchmarks.namespaces import Host
from benchmarks.processes import members
from benchmarks.synthetic_model import RowsOfModel
from verl.checkpoint_engine.errors import IntegrityError
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.checkpoint_engine.support import envs

TIMEOUT = timedelta(seconds=300)
BASELINE, THROUGH_A_FILE, OBJECT_STORE = "gathered broadcast", "safetensors in shm", "ray object store"

Digests = Mapping[tuple[str, int], str]
"""(tensor, first row) to the digest of the rows that one rank holds."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Who moves what. Ranks are processes 0 to `trainers` - 1, nodes come after them."""

    specs: Sequence[TensorSpec]
    source_dtype: str
    trainers: int
    nodes: int


@dataclass(frozen=True, kw_only=True)
class PeerSample:
    """`blocked_s`: until the slowest rank may train again. `total_s`: until all are done and nodes have everything."""

    blocked_s: float
    total_s: float


Way = Callable[[], PeerSample]
"""Change the weights, move one version, compare digests. Raises IntegrityError if a node has other bytes."""


# --- what the three have in common ------------------------------------------------------------------------------------


class Rank:
    """A trainer rank's rows."""

    def __init__(self, job: Job, rank: int) -> None:
        torch.set_num_threads(1)
        self._source = RowsOfModel(list(job.specs), rank, job.trainers, job.source_dtype)
        self._specs = job.specs
        self._shards = {shard.name: shard for shard in self._source.shards()}

    def step(self) -> None:
        self._source.step()

    def rows(self, spec: TensorSpec) -> torch.Tensor:
        """Its rows of `spec`, cast; none if it holds none."""
        shard = self._shards.get(spec.name)
        shape = (0, *spec.shape[1:]) if shard is None else shard.box.shape
        rows = torch.empty(shape, dtype=getattr(torch, spec.dtype))
        if shard is not None:
            self._source.copy(shard, rows)
        return rows

    def put(self) -> list[Any]:
        """The reference to its rows in Ray's object store. In a list: Ray would resolve a bare one."""
        import ray

        return [ray.put({spec.name: _as_bytes(self.rows(spec)) for spec in self._specs})]

    def digests(self) -> Digests:
        held = (spec for spec in self._specs if spec.name in self._shards)
        return {(spec.name, self._shards[spec.name].box.start[0]): _digest(self.rows(spec)) for spec in held}


class Node:
    """A rollout node's whole tensors."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self.whole = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in job.specs}
        self._trainers = job.trainers

    def get(self, references: list[list[Any]]) -> None:
        """What ranks have put."""
        import ray

        parts = ray.get([reference for (reference,) in references])
        for name, tensor in self.whole.items():
            np.concatenate([part[name] for part in parts], out=_as_bytes(tensor))

    def digests(self) -> Digests:
        return digests_of(self.whole, self._trainers)


def digests_of(whole: Mapping[str, torch.Tensor], trainers: int) -> Digests:
    """Of the rows that each rank holds, in a node's whole tensors."""
    digests = {}
    for name, tensor in whole.items():
        per_rank = -(-tensor.shape[0] // trainers)
        for first in range(0, tensor.shape[0], per_rank):
            digests[name, first] = _digest(tensor[first : first + per_rank])
    return digests


def _digest(rows: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(_as_bytes(rows.contiguous()).data)


def _as_bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


def require_equal(way: str, ranks: Sequence[Digests], nodes: Sequence[Digests]) -> None:
    """Raises IntegrityError that names the first rows which a node has otherwise than the rank that sent them."""
    expected = {key: digest for digests in ranks for key, digest in digests.items()}
    for index, found in enumerate(nodes):
        if found.keys() != expected.keys():
            raise IntegrityError(f"{way}: node {index} has {len(found)} blocks of rows of {len(expected)}")
        for (name, first), digest in expected.items():
            if found[name, first] != digest:
                raise IntegrityError(f"{way}: node {index} has other bytes in {name} from row {first}")


# --- gathering: one gloo group of all processes -----------------------------------------------------------------------


@contextmanager
def gathering(job: Job, hosts: Sequence[Host] | None = None) -> Iterator[dict[str, Way]]:
    """The two ways that gather, in processes that end with the block.

    `hosts`: one for all ranks, then one for each node. By default all are here.
    """
    path = envs.shm_dir() / f"verl-benchmark-{os.getpid()}.safetensors"
    meeting = (hosts[0].address if hosts else "127.0.0.1", free_port())
    count = job.trainers + job.nodes
    makers = {f"peer-{index}": partial(_Process, job, index, meeting, path) for index in range(count)}
    places = [hosts[max(index - job.trainers + 1, 0)] for index in range(count)] if hosts else None
    try:
        with members(makers, places) as processes:

            def run(way: str) -> PeerSample:
                moving = [process.submit("move", way) for process in processes]
                seconds, digests = zip(*(moved.result() for moved in moving), strict=True)
                require_equal(way, digests[: job.trainers], digests[job.trainers :])
                return PeerSample(blocked_s=max(seconds[: job.trainers]), total_s=max(seconds))

            yield {way: partial(run, way) for way in (BASELINE, THROUGH_A_FILE)}
    finally:
        path.unlink(missing_ok=True)


class _Process:
    """One rank or node."""

    def __init__(self, job: Job, index: int, meeting: tuple[str, int], path: Path) -> None:
        """`meeting`: where process 0 opens the store."""
        store = TCPStore(*meeting, is_master=index == 0, timeout=TIMEOUT, wait_for_workers=False)
        count = job.trainers + job.nodes
        dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=TIMEOUT)
        self._job, self._path, self._is_sender = job, path, index == 0
        self._rank = Rank(job, index) if index < job.trainers else None
        self._node = Node(job) if self._rank is None else None
        self._ranks = dist.new_group(list(range(job.trainers)))
        self._receivers = dist.new_group([0, *range(job.trainers, count)])

    def move(self, way: str) -> tuple[float, Digests]:
        """One version, changed before; its seconds, and the digests of what is here."""
        if self._rank is not None:
            self._rank.step()
        dist.barrier()
        start_s = time.perf_counter()
        if way == BASELINE:
            self._broadcast()
        else:
            self._through_a_file()
        seconds = time.perf_counter() - start_s
        holder = self._rank or self._node
        assert holder is not None
        return seconds, holder.digests()

    def _gather(self, spec: TensorSpec) -> torch.Tensor:
        """The whole tensor on every rank, which sends its rows padded to equal numbers, as DTensor does."""
        assert self._rank is not None
        rows = self._rank.rows(spec)
        per_rank = -(-spec.shape[0] // self._job.trainers)
        padded = torch.zeros((per_rank, *spec.shape[1:]), dtype=rows.dtype)
        padded[: rows.shape[0]] = rows
        whole = torch.empty((per_rank * self._job.trainers, *spec.shape[1:]), dtype=rows.dtype)
        dist.all_gather(list(whole.chunk(self._job.trainers)), padded, group=self._ranks)
        return whole[: spec.shape[0]]

    def _broadcast(self) -> None:
        for spec in self._job.specs:
            whole = self._node.whole[spec.name] if self._node else self._gather(spec)
            if self._node or self._is_sender:
                dist.broadcast(whole, src=0, group=self._receivers)

    def _through_a_file(self) -> None:
        from safetensors import safe_open
        from safetensors.torch import save_file

        if self._node is None:
            whole = {spec.name: self._gather(spec) for spec in self._job.specs}
            if not self._is_sender:
                return
            save_file(whole, self._path)
        dist.barrier(group=self._receivers)
        if self._node is not None:
            with safe_open(self._path, framework="pt") as file:
                for name, tensor in self._node.whole.items():
                    tensor.copy_(file.get_tensor(name))


# --- Ray's object store -----------------------------------------------------------------------------------------------


@contextmanager
def ray_object_store(job: Job) -> Iterator[dict[str, Way]]:
    """Every rank puts its rows, every node gets them, in a Ray of its own that ends with the block."""
    ray: Any = importlib.import_module("ray")  # nothing else here needs it
    session = importlib.import_module("verl.trainer.fleet.session").RaySession()
    nbytes = sum(spec.nbytes for spec in job.specs)
    session.start({"num_cpus": job.trainers + job.nodes, "object_store_memory": int(2.5 * nbytes) + 2**28})
    try:
        ranks = [ray.remote(Rank).remote(job, rank) for rank in range(job.trainers)]
        nodes = [ray.remote(Node).remote(job) for _ in range(job.nodes)]

        def run() -> PeerSample:
            ray.get([rank.step.remote() for rank in ranks])
            start_s = time.perf_counter()
            references = ray.get([rank.put.remote() for rank in ranks])
            blocked_s = time.perf_counter() - start_s
            ray.get([node.get.remote(references) for node in nodes])
            total_s = time.perf_counter() - start_s
            digests = [ray.get([member.digests.remote() for member in held]) for held in (ranks, nodes)]
            require_equal(OBJECT_STORE, *digests)
            return PeerSample(blocked_s=blocked_s, total_s=total_s)

        yield {OBJECT_STORE: run}
    finally:
        session.close()


PEERS: tuple[Callable[[Job], AbstractContextManager[dict[str, Way]]], ...] = (gathering, ray_object_store)
