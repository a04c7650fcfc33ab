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
import sys
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks import comparison
from benchmarks.command import conduct, parse
from benchmarks.fleet import on_one_host
from benchmarks.machine import Memcpy, require_memory
from benchmarks.peers import Job
from benchmarks.report import Panel, Report, medians, table
from benchmarks.synthetic_model import MIN_NBYTES, qwen_like_specs, row_sources
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.memory.committed import read_committed
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.checkpoint_engine.ports import OnlyLoads
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support import envs
from verl.utils.config import option

WARM_UP = 2
"""Versions before the measured ones: each of the two slots has been written and mapped once."""
TARGET = 0.6
"""Of one-thread memcpy, for `naive`: for publish, stage and verify together, and for a rank with its own bytes."""
PHASES = ("publish", "stage", "verify", "activate")


@dataclass(frozen=True, kw_only=True)
class Settings:
    backend: str = option("naive", "checkpoint engine backend, or `all` of them")
    size_gib: float = option(1.0, "model size at the rollout dtype", least=MIN_NBYTES / 2**30)
    trainers: int = option(2, "trainer ranks, a process each", least=1)
    nodes: int = option(1, "rollout nodes, each with an arena of its own", least=1)
    replicas: int = option(1, "replicas that copy each version out", least=0)
    repeats: int = option(5, "measured versions, after the warm-up", least=1)
    dtype: str = option("bfloat16", "what replicas receive", choices=("bfloat16", "float16", "float32"))
    source_dtype: str = option("bfloat16", "what trainer ranks hold", choices=("bfloat16", "float32"))
    block_kilobytes: int = option(1024, "largest piece with a digest", least=4)


class CopyingReplica(OnlyLoads):
    """Stands for an engine: copies a version into memory of its own, allocated once."""

    def __init__(self, name: str, node_index: int, specs: list[TensorSpec]) -> None:
        self.name = name
        self.node_index = node_index
        self.weights = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}

    async def activate(self, arena_path: str, version: int) -> None:
        await asyncio.to_thread(self._copy, arena_path, version)

    def _copy(self, arena_path: str, version: int) -> None:
        for name, tensor in read_committed(arena_path, version):
            self.weights[name].copy_(tensor)


async def measure(settings: Settings) -> dict[str, Any]:
    """One backend; everything that the JSON file holds."""
    config = CheckpointEngineConfig(backend=settings.backend, block_kilobytes=settings.block_kilobytes)
    resolve_backend(config)
    specs = qwen_like_specs(int(settings.size_gib * 2**30), settings.dtype)
    nbytes = sum(spec.nbytes for spec in specs)
    itemsize = getattr(torch, settings.source_dtype).itemsize / getattr(torch, settings.dtype).itemsize
    require_memory(nbytes * (itemsize + 2 * settings.nodes + settings.replicas), f"--size-gib {settings.size_gib:g}")
    sources = row_sources(specs, settings.trainers, settings.source_dtype)
    samples = []
    with closing(Memcpy(nbytes, settings.trainers)) as memcpy:
        async with on_one_host(config, sources, settings.nodes) as fleet:
            places = [index % settings.nodes for index in range(settings.replicas)]
            replicas = [CopyingReplica(f"replica-{index}", node, specs) for index, node in enumerate(places)]
            await fleet.manager.add_replicas(replicas)
            for version in range(WARM_UP + settings.repeats):
                await fleet.of_ranks("step")
                limits = {
                    "memcpy_gbytes_per_s": memcpy.gbytes_per_s(1),
                    "memcpy_all_ranks_gbytes_per_s": memcpy.gbytes_per_s(settings.trainers),
                }
                report = await fleet.manager.update_weights(version)
                phases = {f"{phase}_s": seconds for phase, seconds in report.phase_s.items()}
                samples.append({"version": version, **limits, **phases, "trainer_blocked_s": report.trainer_blocked_s})
            shared = shared_nbytes(fleet.job)
    summary = summarise(samples[WARM_UP:], nbytes * settings.nodes, nbytes / settings.trainers)
    return {
        "model": {"nbytes": nbytes, "tensors": len(specs)},
        "shared_memory": {
            "nbytes": shared,
            "per_node_in_models": shared / settings.nodes / nbytes,
            "left_after_close_nbytes": shared_nbytes(fleet.job),
        },
        "samples": samples[WARM_UP:],
        "summary": summary | (target(summary) if settings.backend == "naive" else {}),
    }


async def compare(settings: Settings) -> dict[str, Any]:
    job = Job(
        specs=qwen_like_specs(int(settings.size_gib * 2**30), settings.dtype),
        source_dtype=settings.source_dtype,
        trainers=settings.trainers,
        nodes=settings.nodes,
    )
    require_memory(comparison.needed_nbytes(job), f"--size-gib {settings.size_gib:g}")
    return await comparison.compare(job, settings.repeats, settings.block_kilobytes)


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
        **{key: value for key, value in medians(samples).items() if key.startswith("memcpy")},
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


ROWS = {
    "publish_and_stage": "publish + stage",
    "verify": "verify",
    "publish_stage_verify": "publish + stage + verify",
    "activate_by_copying": "activate (copy into own memory)",
    "trainer_blocked": "trainer rank blocked (own bytes)",
}


def report(result: dict[str, Any]) -> Report:
    summary, settings = result["summary"], result["settings"]
    size_gib = result["model"]["nbytes"] / 2**30
    one, every = summary["memcpy_gbytes_per_s"], summary["memcpy_all_ranks_gbytes_per_s"]
    rows: list[dict[str, Any]] = [
        {"what": f"memcpy, threads: {threads}", "seconds": None, "gbytes_per_s": rate, "fraction_of_memcpy": rate / one}
        for threads, rate in ((1, one), (settings["trainers"], every))
    ]
    rows += [{"what": label, **summary[key]} for key, label in ROWS.items()]
    columns = {
        f"median of {settings['repeats']}": "{what}",
        "seconds": "{seconds:.3f}",
        "GB/s": "{gbytes_per_s:.2f}",
        "of memcpy": "{fraction_of_memcpy:.0%}",
    }
    title = (
        f"{settings['backend']}: {size_gib:.2f} GiB {settings['dtype']} from {settings['source_dtype']}, "
        f"trainer ranks: {settings['trainers']}, nodes: {settings['nodes']}, replicas: {settings['replicas']}"
    )
    verdict = "beside the raw speed of its library: --backend all"
    if "target_fraction" in summary:
        wanted = f"{summary['target_fraction']:.0%} of one-thread memcpy for publish + stage + verify and for a rank"
        verdict = f"target ({wanted}): {'reached' if summary['target_reached'] else 'NOT reached'}"
    shared = result["shared_memory"]
    panel = Panel(
        kind="stacked bars",
        series={
            phase: [(f"version {sample['version']}", sample[f"{phase}_s"]) for sample in result["samples"]]
            for phase in PHASES
        },
        x="seconds",
    )
    return Report(
        [
            table(title, columns, rows),
            f"shared memory: {shared['nbytes'] / 2**30:.2f} GiB, {shared['per_node_in_models']:.2f} x model per node; "
            f"after closing: {shared['left_after_close_nbytes']} bytes",
            verdict,
        ],
        [panel],
        title,
    )


def main(arguments: list[str] | None = None) -> int:
    settings, output = parse("weight_sync", __doc__, Settings, arguments)
    torch.set_num_threads(1)
    if settings.backend == "all":
        name, compared = "weight_sync_comparison", lambda: compare(settings)
        return conduct(name, settings, output, compared, comparison.report)
    return conduct("weight_sync", settings, output, lambda: measure(settings), report)


if __name__ == "__main__":
    sys.exit(main())
