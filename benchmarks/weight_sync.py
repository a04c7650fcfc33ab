"""How fast a version gets from trainer ranks to replicas, next to what plain memory copies take on the same machine.

    python -m benchmarks.weight_sync --backend naive --size-gib 1 --trainers 2

    python -m benchmarks.weight_sync --backend all --size-gib 1 --trainers 2 --nodes 1

`all` measures every backend that runs here beside the raw speed of its library, and what others do: see `comparison`.

Trainer ranks are processes, the node and its arena are the real ones. Every repeat measures memcpy first and then one
version, so that both sides see the same machine. Activation is stood in for by replicas that copy every tensor out of
the arena into memory of their own: the least that any engine does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import comparison_report, weight_sync_report
from benchmarks.command import make_parser, run
from benchmarks.comparison import compare, needed_nbytes
from benchmarks.machine import Memcpy, available_nbytes, describe_machine
from benchmarks.peers import Job
from benchmarks.rank_process import RankProcess
from benchmarks.synthetic_model import MIN_NBYTES, RowsOfModel, qwen_like_specs
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.memory.committed import read_committed
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode

WARM_UP = 2
"""Versions before the measured ones: each of the two slots has been written and mapped once."""
TARGET = 0.6
"""Of one-thread memcpy, for `naive`: for publish, stage and verify together, and for a rank with its own bytes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    backend: str
    size_gib: float
    trainers: int
    nodes: int
    replicas: int
    repeats: int
    dtype: str
    source_dtype: str
    block_kilobytes: int


class CopyingReplica:
    """Stands for an engine: copies a version into memory of its own, allocated once."""

    def __init__(self, name: str, node_index: int, specs: list[TensorSpec]) -> None:
        self.name = name
        self.node_index = node_index
        self.weights = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}

    async def pause(self, mode: str) -> None:
        pass

    async def activate(self, arena_path: str, version: int) -> None:
        await asyncio.to_thread(self._copy, arena_path, version)

    def _copy(self, arena_path: str, version: int) -> None:
        for name, tensor in read_committed(arena_path, version):
            self.weights[name].copy_(tensor)

    async def resume(self) -> None:
        pass

    async def health(self) -> None:
        pass

    async def sleep(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass

    async def release_kv_cache(self) -> None:
        pass

    async def resume_kv_cache(self) -> None:
        pass


async def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds."""
    config = CheckpointEngineConfig(backend=settings.backend, block_kilobytes=settings.block_kilobytes)
    resolve_backend(config)
    specs = qwen_like_specs(int(settings.size_gib * 2**30), settings.dtype)
    nbytes = sum(spec.nbytes for spec in specs)
    itemsize = getattr(torch, settings.source_dtype).itemsize / getattr(torch, settings.dtype).itemsize
    require_memory(settings, int(nbytes * (itemsize + 2 * settings.nodes + settings.replicas)))
    machine = describe_machine()
    trainers = [
        RankProcess(rank, partial(RowsOfModel, specs, rank, settings.trainers, settings.source_dtype), config)
        for rank in range(settings.trainers)
    ]
    job = f"benchmark-{os.getpid()}"
    nodes = [RolloutNode(index, config, job=job, shm_dir=envs.shm_dir()) for index in range(settings.nodes)]
    manager = CheckpointEngineManager(config=config, trainers=trainers, nodes=nodes)
    memcpy = Memcpy(nbytes, settings.trainers)
    try:
        replicas = [
            CopyingReplica(f"replica-{index}", index % settings.nodes, specs) for index in range(settings.replicas)
        ]
        await manager.add_replicas(replicas)
        samples = []
        for version in range(WARM_UP + settings.repeats):
            await asyncio.gather(*(trainer.step() for trainer in trainers))
            limits = {
                "memcpy_gbytes_per_s": memcpy.gbytes_per_s(1),
                "memcpy_all_ranks_gbytes_per_s": memcpy.gbytes_per_s(settings.trainers),
            }
            report = await manager.update_weights(version)
            if version >= WARM_UP:
                phases = {f"{phase}_s": seconds for phase, seconds in report.phase_s.items()}
                samples.append({"version": version, **limits, **phases, "trainer_blocked_s": report.trainer_blocked_s})
        shared = shared_nbytes(job)
    finally:
        await manager.close()
        memcpy.close()
    summary = summarise(samples, nbytes * settings.nodes, nbytes / settings.trainers)
    return {
        "benchmark": "weight_sync",
        "settings": asdict(settings),
        "machine": machine,
        "model": {"nbytes": nbytes, "tensors": len(specs)},
        "shared_memory": {
            "nbytes": shared,
            "per_node_in_models": shared / settings.nodes / nbytes,
            "left_after_close_nbytes": shared_nbytes(job),
        },
        "samples": samples,
        "summary": summary | (target(summary) if settings.backend == "naive" else {}),
    }


async def compare_all(settings: Settings) -> dict[str, Any]:
    job = Job(
        specs=qwen_like_specs(int(settings.size_gib * 2**30), settings.dtype),
        source_dtype=settings.source_dtype,
        trainers=settings.trainers,
        nodes=settings.nodes,
    )
    require_memory(settings, needed_nbytes(job))
    return await compare(job, settings.repeats, settings.block_kilobytes)


def summarise(samples: list[dict[str, float]], nbytes: int, own_nbytes: float) -> dict[str, Any]:
    """Medians. `nbytes` travel per version, `own_nbytes` of them (per node) belong to one rank."""

    def row(seconds_of: Any, size: float = nbytes) -> dict[str, float]:
        rates = [size / max(seconds_of(sample), 1e-9) / 1e9 for sample in samples]
        return {
            "seconds": median(map(seconds_of, samples)),
            "gbytes_per_s": median(rates),
            "fraction_of_memcpy": median(
                rate / sample["memcpy_gbytes_per_s"] for rate, sample in zip(rates, samples, strict=True)
            ),
        }

    return {
        "memcpy_gbytes_per_s": median(sample["memcpy_gbytes_per_s"] for sample in samples),
        "memcpy_all_ranks_gbytes_per_s": median(sample["memcpy_all_ranks_gbytes_per_s"] for sample in samples),
        "publish_and_stage": row(lambda sample: sample["publish_s"] + sample["stage_s"]),
        "verify": row(lambda sample: sample["verify_s"]),
        "publish_stage_verify": row(lambda sample: sample["publish_s"] + sample["stage_s"] + sample["verify_s"]),
        "activate_by_copying": row(lambda sample: sample["activate_s"]),
        "trainer_blocked": row(lambda sample: sample["trainer_blocked_s"], own_nbytes),
    }


def target(summary: dict[str, Any]) -> dict[str, Any]:
    fractions = [summary[part]["fraction_of_memcpy"] for part in ("publish_stage_verify", "trainer_blocked")]
    return {"target_fraction": TARGET, "target_reached": min(fractions) >= TARGET}


def shared_nbytes(job: str) -> int:
    """Bytes of shared memory that the job's arenas occupy at this moment."""
    files = [path for path in envs.shm_dir().glob(f"verl-{job}-*/*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)


def require_memory(settings: Settings, needed_nbytes: int) -> None:
    """Raises ConfigError if the ranks' weights, two slots per node, and the copies that are made do not fit."""
    if needed_nbytes > available_nbytes():
        raise ConfigError(
            f"--size-gib {settings.size_gib} needs {needed_nbytes / 2**30:.1f} GiB of memory "
            f"({settings.trainers} trainer ranks, {settings.nodes} node arenas of two slots, and copies); "
            f"{available_nbytes() / 2**30:.1f} GiB are available"
        )


def parse(arguments: list[str] | None) -> tuple[Settings, Path]:
    parser = make_parser("weight_sync", __doc__)
    add = parser.add_argument
    add("--backend", default="naive", help="checkpoint engine backend, or `all` of them (default: %(default)s)")
    add("--size-gib", type=float, default=1.0, help="model size at the rollout dtype (default: %(default)s)")
    add("--trainers", type=int, default=2, help="trainer ranks, a process each (default: %(default)s)")
    add("--nodes", type=int, default=1, help="rollout nodes, each with an arena of its own (default: %(default)s)")
    add("--replicas", type=int, default=1, help="replicas that copy each version out (default: %(default)s)")
    add("--repeats", type=int, default=5, help="measured versions, after the warm-up (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="what replicas receive")
    add("--source-dtype", default="bfloat16", choices=("bfloat16", "float32"), help="what trainer ranks hold")
    add("--block-kilobytes", type=int, default=1024, help="largest piece with a digest (default: %(default)s)")
    values = vars(parser.parse_args(arguments))
    output = values.pop("output")
    if not values["size_gib"] * 2**30 >= MIN_NBYTES:
        parser.error(f"--size-gib must be at least {MIN_NBYTES / 2**30:.6f} (1 MiB), not {values['size_gib']}")
    for name, least in {"trainers": 1, "nodes": 1, "repeats": 1, "replicas": 0, "block_kilobytes": 4}.items():
        if values[name] < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {values[name]}")
    return Settings(**values), output


def main(arguments: list[str] | None = None) -> int:
    settings, output = parse(arguments)
    torch.set_num_threads(1)
    every = settings.backend == "all"
    report: Any = comparison_report if every else weight_sync_report
    return run(
        output,
        lambda: asyncio.run((compare_all if every else measure)(settings)),
        print_table=report.print_table,
        draw=report.draw,
    )


if __name__ == "__main__":
    sys.exit(main())
