"""How long a sync blocks the trainer under each training engine, next to gathering and broadcasting from rank 0.

    python -m benchmarks.strategies --size-mib 512

Engines are the real ones, of two ranks each, with a Qwen2 of random weights that is made on the spot. Every repeat
sends them the vanilla way: each tensor is gathered on the trainers' group and broadcast from rank 0 to one receiver
over gloo. Then it syncs them through the real manager into a replica that copies them. The trainer goes on meanwhile
with a small forward pass, and then changes the weights. What the replica and the receiver got is compared.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks import processes
from benchmarks.command import program, progress
from benchmarks.comparison import CONTENDERS
from benchmarks.engine_rank import MEGATRON, RANKS, STRATEGIES, EngineRank
from benchmarks.fleet import Fleet, on_one_host
from benchmarks.machine import require_memory
from benchmarks.peers import TIMEOUT, digests_of, require_equal
from benchmarks.random_model import MIN_MIB, make_random_model, specs_of
from benchmarks.raw import broadcast, group_of_two
from benchmarks.report import Panel, Report, medians, table
from benchmarks.weight_sync import CopyingReplica
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.checkpoint_engine.registry import resolve_backend
from verl.utils.config import option
from verl.workers.config import FSDPConfig, HFModelConfig
from verl.workers.engine.registry import check_engine

WARM_UP = 2
"""Rounds before the measured ones: each of the two slots has been written and mapped once."""
TARGET = 20.0
"""Times shorter than the vanilla way blocks."""
IMPORTS = [
    "benchmarks.engine_rank",
    *(f"verl.workers.engine.{name}" for name in ("fsdp.fsdp1", "fsdp.fsdp2", "megatron.engine")),
]
COPIES = 8
"""Of the model at the peak: shards, packed shards, two slots, replica, receiver, and two gathered models."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    backend: str = option("naive", "checkpoint engine backend")
    strategies: list[str] = option(list(STRATEGIES), "training engines", choices=STRATEGIES)
    size_mib: float = option(512.0, "of bfloat16 parameters", least=MIN_MIB)
    repeats: int = option(5, "measured rounds, after the warm-up", least=1)


async def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds."""
    options = {contender.backend: contender.options for contender in CONTENDERS}.get(settings.backend, {})
    engine_kwargs = {settings.backend: options} if options else {}
    config = CheckpointEngineConfig(backend=settings.backend, engine_kwargs=engine_kwargs)
    resolve_backend(config)
    require_memory(COPIES * settings.size_mib * 2**20, f"--size-mib {settings.size_mib:g}")
    with tempfile.TemporaryDirectory() as directory:
        progress(f"making a model of {settings.size_mib} MiB")
        model = make_random_model(directory, settings.size_mib)
        for name in settings.strategies:
            check_engine(
                name,
                fsdp=FSDPConfig(),
                megatron=MEGATRON,
                model=HFModelConfig(path=directory),
                world_size=RANKS,
                device="cpu",
            )
        specs = specs_of(model)
        processes.IMPORTS += IMPORTS  # by one process, from which all are forked
        measured = {
            name: await measure_strategy(name, model, specs, config, settings.repeats) for name in settings.strategies
        }
    return {
        "model": {"nbytes": sum(spec.nbytes for spec in specs), "tensors": len(specs)},
        "ranks": RANKS,
        "target": TARGET,
        "strategies": measured,
    }


async def measure_strategy(
    strategy: str, model: Path, specs: list[TensorSpec], config: CheckpointEngineConfig, repeats: int
) -> dict[str, Any]:
    progress(f"{strategy}: building {RANKS} ranks")
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    sources = [partial(EngineRank, strategy, model, rank, store.port) for rank in range(RANKS)]
    replica = CopyingReplica("replica", 0, specs)
    received = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs}
    samples = []
    async with on_one_host(config, sources, 1, tuned=False) as fleet:
        await fleet.manager.add_replicas([replica])
        await fleet.of_ranks("private_nbytes")  # fails if a rank could not build its engine
        group, _ = await asyncio.gather(
            asyncio.to_thread(group_of_two, PrefixStore("receiver", store), 1), fleet.of_ranks("meet_receiver")
        )
        for version in range(WARM_UP + repeats):
            progress(f"{strategy}: version {version} of {WARM_UP + repeats - 1}")
            samples.append(await one_round(version, fleet, group, received))
            digest = require_same(strategy, replica.weights, received)
    summary: dict[str, Any] = medians(samples[WARM_UP:])
    shorter_by = summary["vanilla_s"] / summary["blocked_s"]
    return {
        "samples": samples[WARM_UP:],
        "summary": {**summary, "shorter_by": shorter_by, "target_reached": shorter_by >= TARGET},
        "digest": digest,
    }


async def one_round(version: int, fleet: Fleet, group: Any, received: dict[str, torch.Tensor]) -> dict[str, float]:
    """Send the weights both ways; while a sync has them, the trainer goes on, until it changes them."""
    (vanilla_s, *_), _ = await asyncio.gather(fleet.of_ranks("broadcast"), asyncio.to_thread(receive, group, received))
    alone_s = max(await fleet.of_ranks("compute_log_prob"))
    start_s, released_s = time.perf_counter(), asyncio.get_running_loop().create_future()
    syncing = asyncio.create_task(
        fleet.manager.update_weights(version, released=lambda: released_s.set_result(time.perf_counter() - start_s))
    )
    await asyncio.wait([released_s, syncing], return_when=asyncio.FIRST_COMPLETED)
    beside_s = max(await fleet.of_ranks("compute_log_prob"))
    await fleet.of_ranks("step")
    report = await syncing
    return {
        "version": version,
        "blocked_s": released_s.result() + report.trainer_blocked_s,
        "total_s": report.total_s,
        "slowed_s": beside_s - alone_s,
        "forward_s": alone_s,
        "vanilla_s": vanilla_s,
    }


def receive(group: Any, whole: dict[str, torch.Tensor]) -> None:
    """The other side of `EngineRank.broadcast`; `whole` is in the order of names."""
    for tensor in whole.values():
        broadcast(group, tensor).wait()


def require_same(strategy: str, synced: dict[str, torch.Tensor], received: dict[str, torch.Tensor]) -> str:
    """The digest of the model. Raises IntegrityError that names the first tensor in which the two differ."""
    digests = digests_of(received, 1)
    require_equal(f"{strategy}, vanilla", [digests_of(synced, 1)], [digests])
    return xxhash.xxh3_64_hexdigest("".join(digests[key] for key in sorted(digests)).encode())


COLUMNS = {
    "seconds": "{name}",
    "sync: trainer blocked": "{blocked_s:.3f}",
    "sync: total": "{total_s:.3f}",
    "gather: blocked = total": "{vanilla_s:.3f}",
    "blocked shorter by": "{shorter_by:.0f} times",
    "forward pass, alone and longer by": "{forward_s:.3f} + {slowed_s:.3f}",
    "target": "{verdict}",
}


def report(result: dict[str, Any]) -> Report:
    settings = result["settings"]
    title = (
        f"{result['model']['nbytes'] / 2**20:.0f} MiB of bfloat16, backend {settings['backend']}; "
        f"ranks: {result['ranks']}, nodes: 1, replicas: 1; medians of {settings['repeats']}"
    )
    rows = [{"name": name, **measured["summary"]} for name, measured in result["strategies"].items()]
    for row in rows:
        row["verdict"] = "reached" if row["target_reached"] else "missed"
    series = {
        label: [(row["name"], row[key]) for row in rows]
        for label, key in zip(list(COLUMNS)[1:4], ("blocked_s", "total_s", "vanilla_s"), strict=True)
    }
    panel = Panel(kind="bars", series=series, x="seconds", form="%.3f")
    return Report([table(title, COLUMNS, rows), f"target: {result['target']:.0f} times"], [panel], title)


main = program("strategies", __doc__, Settings, measure, report, threads=1)
if __name__ == "__main__":
    sys.exit(main())
