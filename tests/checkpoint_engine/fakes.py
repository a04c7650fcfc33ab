"""Small members of a sync that live in one process: a weight source over plain tensors, a replica that remembers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.memory.committed import read_committed
from verl.checkpoint_engine.plan.types import Box, Shard, SyncReport, TensorSpec
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank


class RowShardedSource:
    """Rank `rank` of `world_size` holds a block of rows of every tensor, as FSDP2 has it; scalars are on every rank."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, dtype: str | None = None
    ) -> None:
        self.tensors = dict(tensors)
        self._rank, self._world_size, self._dtype = rank, world_size, dtype

    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(
                name=name, shape=tuple(tensor.shape), dtype=self._dtype or str(tensor.dtype).removeprefix("torch.")
            )
            for name, tensor in self.tensors.items()
        ]

    def shards(self) -> list[Shard]:
        shards = []
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            if not shape:
                shards.append(Shard(name, Box((), ())))
                continue
            rows = -(-shape[0] // self._world_size)
            start, stop = min(self._rank * rows, shape[0]), min((self._rank + 1) * rows, shape[0])
            if start < stop and tensor.numel():
                shards.append(Shard(name, Box((start, *(0,) * (len(shape) - 1)), (stop, *shape[1:]))))
        return shards

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        box = shard.box
        destination.copy_(self.tensors[shard.name][tuple(map(slice, box.start, box.stop))])


class ColumnShardedSource(RowShardedSource):
    """Rank `rank` holds a block of the last dimension, as row-parallel layers do: strided in a node's slot."""

    def shards(self) -> list[Shard]:
        shards = []
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            if not shape:
                shards.append(Shard(name, Box((), ())))
                continue
            columns = -(-shape[-1] // self._world_size)
            start, stop = min(self._rank * columns, shape[-1]), min((self._rank + 1) * columns, shape[-1])
            if start < stop and tensor.numel():
                shards.append(Shard(name, Box((*(0,) * (len(shape) - 1), start), (*shape[:-1], stop))))
        return shards


class RecordingReplica:
    """Keeps a copy of what it activated. `fail` is called with the name of each step and may raise or sleep."""

    def __init__(self, name: str = "replica-0", node_index: int = 0) -> None:
        self.name = name
        self.node_index = node_index
        self.weights: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.paused = False
        self.log: list[str] = []
        self.fail: Callable[[str], object] = lambda step: None

    async def _step(self, step: str) -> None:
        self.log.append(step)
        outcome = self.fail(step)
        if asyncio.iscoroutine(outcome):
            await outcome

    async def pause(self, mode: str) -> None:
        await self._step("pause")
        self.paused = True

    async def activate(self, arena_path: str, version: int) -> None:
        await self._step("activate")
        self.weights = {name: tensor.clone() for name, tensor in read_committed(arena_path, version)}
        self.version = version

    async def resume(self) -> None:
        await self._step("resume")
        self.paused = False

    async def health(self) -> None:
        await self._step("health")

    async def sleep(self) -> None:
        await self._step("sleep")

    async def wake_up(self) -> None:
        await self._step("wake_up")

    async def release_kv_cache(self) -> None:
        await self._step("release_kv_cache")

    async def resume_kv_cache(self) -> None:
        await self._step("resume_kv_cache")


def assert_bit_equal(replica: RecordingReplica, version: int, expected: Mapping[str, torch.Tensor]) -> None:
    assert replica.version == version
    assert replica.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        received = replica.weights[name]
        assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(received.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)), (
            name
        )


def later(tensors: Mapping[str, torch.Tensor]) -> Callable[[int], dict[str, torch.Tensor]]:
    """Of each version the weights, all of them others."""
    return lambda version: {name: tensor + version for name, tensor in tensors.items()}


def raising(error: Exception, times: int = 10**9) -> Callable[[], None]:
    left = iter(range(times))

    def step() -> None:
        if next(left, None) is not None:
            raise error

    return step


def arenas_in(shm_dir: Path) -> list[Path]:
    return sorted(shm_dir.glob("verl-*"))


def soon(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Wait until `condition` holds; whether it does."""
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def open_descriptors() -> list[str]:
    """What the file descriptors of this process refer to, without those that other threads close at this moment.

    Nor the kernel's tables in /proc: the thread that looks who has connected opens one every few milliseconds.
    """
    targets = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(path))
    return [target for target in targets if not target.startswith("/proc/")]


def send_signal(pid: int, number: int) -> None:
    """Returns when a process that is stopped stands still, or one that is killed has let go of its memory: each thread
    takes notice in its own time."""
    if pid == os.getpid():
        signal.raise_signal(number)
        return
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        assert soon(lambda: all(_is_stopped(path) for path in Path(f"/proc/{pid}/task").iterdir()))
    if number == signal.SIGKILL:
        assert soon(lambda: _state(Path(f"/proc/{pid}")) in "XZ")


def _is_stopped(task: Path) -> bool:
    return _state(task) in "TX"  # or the thread has ended meanwhile


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def spare_slot(shm_dir: Path) -> Path:
    """The slot of the only arena under `shm_dir` that a sync is writing: the one without a manifest."""
    (arena,) = arenas_in(shm_dir)
    (slot,) = {
        path for path in arena.glob("slot-*") if path.suffix != ".manifest" and not Path(f"{path}.manifest").exists()
    }
    return slot


class Through:
    """A member behind a port that can break: `before[method]` and `after[method]` may raise, sleep or damage things."""

    def __init__(self, member: Any) -> None:
        self.member = member
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], Any]] = {}
        self.after: dict[str, Callable[[], Any]] = {}

    @property
    def name(self) -> str:
        return self.member.name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            self.calls.append(method)
            await _maybe(self.before.get(method))
            result = await getattr(self.member, method)(*arguments)
            await _maybe(self.after.get(method))
            return result

        return call


async def _maybe(step: Callable[[], Any] | None) -> None:
    outcome = step() if step else None
    if asyncio.iscoroutine(outcome):
        await outcome


class Fleet:
    """A manager with trainer ranks, nodes and replicas, all in this process, the former through breakable ports."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        shm_dir: Path,
        *,
        trainers: int = 2,
        nodes: int = 1,
        replicas: int = 1,
        dtype: str | None = None,
        source: type[RowShardedSource] = RowShardedSource,
        job: str = "test",
        report_path: Path | None = None,
        hosts: tuple[str, str] | None = None,
        **config: object,
    ) -> None:
        """`hosts` are those of each trainer rank and of each node, one letter each; by default all are on one."""
        at = hosts or ("a" * trainers, "a" * nodes)
        self.config = CheckpointEngineConfig.from_mapping(config)
        self.sources = [source(tensors, rank, trainers, dtype) for rank in range(trainers)]
        self.trainers = [
            Through(TrainerRank(rank, held, self.config, host=at[0][rank])) for rank, held in enumerate(self.sources)
        ]
        self.nodes = [
            Through(RolloutNode(index, self.config, job=job, shm_dir=shm_dir, host=at[1][index]))
            for index in range(nodes)
        ]
        self.replicas = [RecordingReplica(f"replica-{index}", index % nodes) for index in range(replicas)]
        self.manager = CheckpointEngineManager(
            config=self.config, trainers=self.trainers, nodes=self.nodes, report_path=report_path
        )

    async def __aenter__(self) -> Fleet:
        await self.manager.add_replicas(self.replicas)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()

    async def three_versions(
        self, weights_of: Callable[[int], Mapping[str, torch.Tensor]]
    ) -> AsyncIterator[tuple[Mapping[str, torch.Tensor], SyncReport]]:
        """Sync versions 0 to 2, each of which every replica then has, bit-equal. Yields its weights and the report."""
        for version in range(3):
            expected = weights_of(version)
            self.set_weights(expected)
            report = await self.manager.update_weights(version)
            for replica in self.replicas:
                assert_bit_equal(replica, version, expected)
            yield expected, report

    def set_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for source in self.sources:
            source.tensors = dict(tensors)
