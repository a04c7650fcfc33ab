"""Weights that come one after the other, as verl's engines give them, into an arena of this host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..errors import PlanError
from ..memory.arena import NodeArena
from ..memory.committed import open_committed
from ..memory.digest import Manifest, verify
from ..memory.publishing import SlotPieces, copy_values, publish
from ..memory.threads import memory_threads
from ..plan.layout import Layout
from ..plan.shards import ShardTable
from ..plan.sync_plan import SyncPlan, make_plan
from ..plan.types import Box, Shard, TensorSpec
from ..support import envs

BLOCK_NBYTES = 2**20
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class PublishedWeights:
    """Versions in an arena of this process, which is made for the first one. One process for each group of trainers."""

    def __init__(self, *, job: str, slots: int) -> None:
        self._job, self._slots = job, slots
        self._arena: NodeArena | None = None
        self._plan: SyncPlan | None = None

    @property
    def path(self) -> str:
        """Of the arena, also before it is there."""
        return str(envs.shm_dir() / f"verl-{self._job}-0")

    def publish(self, version: int, weights: NamedTensors) -> int:
        """Copy and digest all of `weights`, each as it comes, and commit them. Returns the bytes.

        Of the first version all are held in memory until they are known. Raises PlanError if a later one has other
        names, shapes or dtypes; ConfigError if there is not enough shared memory. The version before is then still
        the committed one.
        """
        if self._arena is None or self._plan is None:
            weights = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights]
            self._arena, self._plan = self._reserved(weights)
        arena, plan = self._arena, self._plan
        arena.begin(version)
        try:
            pieces = SlotPieces(arena.writable_view(), plan, 0)
            source = _Arriving(plan.layout.specs, weights)
            publication = publish(source, pieces)
            source.require_end()
            region = arena.writable_view().bytes.numpy()
            digests = publication.digests.completed(region, pieces.extents, threads=memory_threads())
            arena.commit(version, Manifest.of(version, plan, [digests]))
        except BaseException:
            arena.drop()
            raise
        return publication.nbytes

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _reserved(self, weights: Sequence[tuple[str, torch.Tensor]]) -> tuple[NodeArena, SyncPlan]:
        specs = [
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype)[len("torch.") :])
            for name, tensor in weights
        ]
        layout = Layout.of(specs)
        plan = make_plan(layout, [ShardTable.of(layout, _whole(specs))], block_nbytes=BLOCK_NBYTES)
        shm_dir = envs.shm_dir()
        arena = NodeArena.create(shm_dir=shm_dir, job=self._job, node="0", layout=layout, slots=self._slots)
        assert str(arena.directory) == self.path
        return arena, plan


@contextmanager
def verified(arena_path: str, version: int) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """The tensors of a committed version, digested anew. Borrowed; writing to one ends the process.

    Raises IntegrityError if it is not there, or not what was published.
    """
    with open_committed(arena_path, version) as (manifest, view):
        verify(view.bytes.numpy(), manifest, threads=memory_threads())
        yield view.tensors()


def job_name() -> str:
    return f"for-verl-{os.getpid()}"


def host_id() -> str:
    """The same for processes that share memory files, also in containers of one host that do."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    return f"{boot}/{envs.shm_dir().stat().st_dev}"


class _Arriving:
    """A `WeightSource` of tensors that are there one at a time. They are asked for in the order of the specs.

    What comes before it is asked for is kept as a copy: whoever sends may use its memory again.
    """

    def __init__(self, specs: Sequence[TensorSpec], weights: NamedTensors) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._coming = iter(weights)
        self._early: dict[str, torch.Tensor] = {}
        self._now: tuple[str, torch.Tensor] | None = None
        self._seen: set[str] = set()

    def specs(self) -> Sequence[TensorSpec]:
        return list(self._specs.values())

    def shards(self) -> Sequence[Shard]:
        return _whole(self.specs())

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        tensor = self._tensor(shard.name)
        box = tuple(map(slice, shard.box.start, shard.box.stop))
        with torch.no_grad():
            copy_values(destination, tensor[box])

    def require_end(self) -> None:
        """Raises PlanError for tensors that are none of the model's, and for those that are missing."""
        for name, tensor in self._coming:
            self._take(name, tensor)
        if missing := self._specs.keys() - self._seen:
            raise PlanError(f"not sent this time: {', '.join(sorted(missing))}")

    def _tensor(self, name: str) -> torch.Tensor:
        if self._now is not None and self._now[0] == name:
            return self._now[1]
        if name in self._early:
            self._now = name, self._early.pop(name)
            return self._now[1]
        for arrived, tensor in self._coming:
            self._take(arrived, tensor)
            if arrived == name:
                self._now = name, tensor.detach()
                return self._now[1]
            self._early[arrived] = tensor.detach().to("cpu", copy=True)
        raise PlanError(f"not sent this time: {name}")

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        spec = self._specs.get(name)
        if spec is None or name in self._seen:
            raise PlanError(f"{name} is sent twice" if spec is not None else f"{name} was not in the version before")
        if tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            raise PlanError(
                f"{name}, {spec.dtype} of shape {spec.shape}, is now {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        self._seen.add(name)


def _whole(specs: Sequence[TensorSpec]) -> list[Shard]:
    return [Shard(spec.name, Box.whole(spec.shape)) for spec in specs if spec.numel]
