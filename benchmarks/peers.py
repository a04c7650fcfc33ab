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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks.namespaces import Host
from benchmarks.processes import fresh_processes
from benchmarks.synthetic_model import RowsOfModel
from verl.checkpoint_engine.errors import IntegrityError, TransportError
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.checkpoint_engine.support import envs

TIMEOUT = timedelta(seconds=300)

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
        self._source = RowsOfModel(list(job.specs), rank, job.trainers, job.source_dtype)
        self._boxes = {shard.name: shard for shard in self._source.shards()}

    def step(self) -> None:
        self._source.step()

    def rows(self, spec: TensorSpec) -> torch.Tensor:
        """Its rows of `spec`, cast; none if it holds none."""
        shard = self._boxes.get(spec.name)
        rows = torch.empty((0, *spec.shape[1:]) if shard is None else shard.box.shape, dtype=getattr(torch, spec.dtype))
        if shard is not None:
            self._source.copy(shard, rows)
        return rows

    def digests(self, specs: Sequence[TensorSpec]) -> Digests:
        held = (spec for spec in specs if spec.name in self._boxes)
        return {(spec.name, self._boxes[spec.name].box.start[0]): _digest(self.rows(spec)) for spec in held}


def digests_of(whole: Mapping[str, torch.Tensor], trainers: int) -> Digests:
    """The same, of a node's whole tensors."""
    digests = {}
    for name, tensor in whole.items():
        per_rank = -(-tensor.shape[0] // trainers)
        for first in range(0, tensor.shape[0], per_rank):
            digests[name, first] = _digest(tensor[first : first + per_rank])
    return digests


def _digest(rows: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(rows.contiguous().view(-1).view(torch.uint8).numpy().data)


def require_equal(way: str, ranks: Sequence[Digests], nodes: Sequence[Digests]) -> None:
    """Raises IntegrityError that names the first rows which a node has otherwise than the rank that sent them."""
    expected = {key: digest for digests in ranks for key, digest in digests.items()}
    for index, found in enumerate(nodes):
        if found.keys() != expected.keys():
            raise IntegrityError(f"{way}: node {index} has {len(found)} blocks of rows of {len(expected)}")
        for (name, first), digest in expected.items():
            if found[name, first] != digest:
                raise IntegrityError(f"{way}: node {index} has other bytes in {name} from row {first}")


def _empty_model(specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    return {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}


# --- gathering: one gloo group of all processes -----------------------------------------------------------------------


@contextmanager
def gathering(job: Job, hosts: Sequence[Host] | None = None) -> Iterator[dict[str, Way]]:
    """The two ways that gather, in processes that end with the block.

    `hosts`: one for all ranks, then one for each node. By default all are here.
    """
    path = envs.shm_dir() / f"verl-benchmark-{os.getpid()}.safetensors"
    context = fresh_processes()
    pipes: list[Connection] = []
    processes = []
    meeting = (hosts[0].address if hosts else "127.0.0.1", 0)
    for index in range(job.trainers + job.nodes):
        ours, theirs = context.Pipe()
        place = hosts[max(index - job.trainers + 1, 0)] if hosts else None
        process = context.Process(target=_serve, args=(theirs, job, index, meeting, path, place), daemon=True)
        process.start()
        theirs.close()
        if not pipes:
            meeting = (meeting[0], ours.recv())
        pipes.append(ours)
        processes.append(process)

    def run(way: str) -> PeerSample:
        for pipe in pipes:
            pipe.send(way)
        try:
            answers: list[tuple[float, Digests]] = [pipe.recv() for pipe in pipes]
        except EOFError as exc:
            raise TransportError(f"{way}: a process has ended") from exc
        seconds, digests = [answer[0] for answer in answers], [answer[1] for answer in answers]
        require_equal(way, digests[: job.trainers], digests[job.trainers :])
        return PeerSample(blocked_s=max(seconds[: job.trainers]), total_s=max(seconds))

    try:
        yield {way: lambda way=way: run(way) for way in _WAYS}  # type: ignore[misc]
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        path.unlink(missing_ok=True)


@dataclass
class _Process:
    """One rank or node; `rank` is None on nodes."""

    job: Job
    path: Path
    rank: Rank | None
    is_sender: bool
    ranks: Any
    """Process group of the ranks."""
    receivers: Any
    """Process group of rank 0 and the nodes."""
    whole: dict[str, torch.Tensor]

    def gather(self, spec: TensorSpec) -> torch.Tensor:
        """The whole tensor on every rank, which sends its rows padded to equal numbers, as DTensor does."""
        assert self.rank is not None
        rows = self.rank.rows(spec)
        per_rank = -(-spec.shape[0] // self.job.trainers)
        padded = torch.zeros((per_rank, *spec.shape[1:]), dtype=rows.dtype)
        padded[: rows.shape[0]] = rows
        whole = torch.empty((per_rank * self.job.trainers, *spec.shape[1:]), dtype=rows.dtype)
        dist.all_gather(list(whole.chunk(self.job.trainers)), padded, group=self.ranks)
        return whole[: spec.shape[0]]

    def broadcast(self) -> None:
        for spec in self.job.specs:
            whole = self.whole[spec.name] if self.rank is None else self.gather(spec)
            if self.rank is None or self.is_sender:
                dist.broadcast(whole, src=0, group=self.receivers)

    def through_a_file(self) -> None:
        from safetensors import safe_open
        from safetensors.torch import save_file

        if self.rank is not None:
            whole = {spec.name: self.gather(spec) for spec in self.job.specs}
            if not self.is_sender:
                return
            save_file(whole, self.path)
        dist.barrier(group=self.receivers)
        if self.rank is None:
            with safe_open(self.path, framework="pt") as file:
                for name, tensor in self.whole.items():
                    tensor.copy_(file.get_tensor(name))


_WAYS: dict[str, Callable[[_Process], None]] = {
    "gathered broadcast": _Process.broadcast,
    "safetensors in shm": _Process.through_a_file,
}


def _serve(pipe: Connection, job: Job, index: int, meeting: tuple[str, int], path: Path, place: Host | None) -> None:
    """`meeting`: where process 0 opens the store, on any port, which it tells first."""
    if place is not None:
        place.enter()
    torch.set_num_threads(1)
    store = TCPStore(*meeting, is_master=index == 0, timeout=TIMEOUT, wait_for_workers=False)
    if index == 0:
        pipe.send(store.port)
    members = job.trainers + job.nodes
    dist.init_process_group("gloo", store=store, rank=index, world_size=members, timeout=TIMEOUT)
    process = _Process(
        job=job,
        path=path,
        rank=Rank(job, index) if index < job.trainers else None,
        is_sender=index == 0,
        ranks=dist.new_group(list(range(job.trainers))),
        receivers=dist.new_group([0, *range(job.trainers, members)]),
        whole={} if index < job.trainers else _empty_model(job.specs),
    )
    while True:
        try:
            way = pipe.recv()
        except EOFError:
            dist.destroy_process_group()
            return
        if process.rank is not None:
            process.rank.step()
        dist.barrier()
        start_s = time.perf_counter()
        _WAYS[way](process)
        seconds = time.perf_counter() - start_s
        digests = process.rank.digests(job.specs) if process.rank else digests_of(process.whole, job.trainers)
        pipe.send((seconds, digests))


# --- Ray's object store -----------------------------------------------------------------------------------------------


class _RayRank:
    def __init__(self, job: Job, rank: int) -> None:
        torch.set_num_threads(1)
        self._job, self._rank = job, Rank(job, rank)

    def step(self) -> None:
        self._rank.step()

    def put(self) -> list[Any]:
        """The reference to this rank's rows of every tensor. In a list: Ray would resolve a bare one."""
        import ray

        return [ray.put({spec.name: _as_bytes(self._rank.rows(spec)) for spec in self._job.specs})]

    def digests(self) -> Digests:
        return self._rank.digests(self._job.specs)


class _RayNode:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self._job = job
        self._whole = _empty_model(job.specs)

    def get(self, references: list[list[Any]]) -> None:
        import ray

        parts = ray.get([reference for (reference,) in references])
        for name, tensor in self._whole.items():
            np.concatenate([part[name] for part in parts], out=_as_bytes(tensor))

    def digests(self) -> Digests:
        return digests_of(self._whole, self._job.trainers)


def _as_bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


@contextmanager
def ray_object_store(job: Job) -> Iterator[dict[str, Way]]:
    """Ray's object store, in a Ray of its own that ends with the block."""
    ray: Any = importlib.import_module("ray")  # nothing else here needs it
    session = importlib.import_module("verl.trainer.fleet.session").RaySession()
    way = "ray object store"
    nbytes = sum(spec.nbytes for spec in job.specs)
    members = job.trainers + job.nodes
    session.start({"num_cpus": members, "object_store_memory": int(2.5 * nbytes) + 2**28})
    try:
        ranks = [ray.remote(_RayRank).remote(job, rank) for rank in range(job.trainers)]
        nodes = [ray.remote(_RayNode).remote(job) for _ in range(job.nodes)]

        def run() -> PeerSample:
            ray.get([rank.step.remote() for rank in ranks])
            start_s = time.perf_counter()
            references = ray.get([rank.put.remote() for rank in ranks])
            blocked_s = time.perf_counter() - start_s
            ray.get([node.get.remote(references) for node in nodes])
            total_s = time.perf_counter() - start_s
            digests = [ray.get([member.digests.remote() for member in members]) for members in (ranks, nodes)]
            require_equal(way, *digests)
            return PeerSample(blocked_s=blocked_s, total_s=total_s)

        yield {way: run}
    finally:
        session.close()


PEERS: tuple[Callable[[Job], AbstractContextManager[dict[str, Way]]], ...] = (gathering, ray_object_store)
