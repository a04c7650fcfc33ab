"""How long a sync blocks the trainer under each training engine, next to gathering and broadcasting from rank 0.

    python -m benchmarks.strategies --size-mib 512

Engines are the real ones, of two ranks each, with a Qwen2 of random weights that is made on the spot. Every repeat
sends them the vanilla way: each tensor is gathered on the trainers' group and broadcast from rank 0 to one receiver
over gloo. Then it syncs them through the real manager into a replica that copies them. The trainer goes on meanwhile
with a small forward pass, and then changes the weights. What the replica and the receiver got is compared.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import xxhash
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks import strategies_report
from benchmarks.command import make_parser, progress, require_known, run
from benchmarks.comparison import CONTENDERS
from benchmarks.engine_rank import MEGATRON, RANKS, STRATEGIES, EngineRank
from benchmarks.machine import available_nbytes, describe_machine
from benchmarks.peers import TIMEOUT, digests_of, require_equal
from benchmarks.random_model import MIN_MIB, make_random_model
from benchmarks.rank_process import RankProcess
from benchmarks.raw_gloo import broadcast, group_of_two
from benchmarks.weight_sync import CopyingReplica
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.workers.config import FSDPConfig, HFModelConfig
from verl.workers.engine.registry import check_engine
from verl.workers.hf.checkpoint import HFCheckpoint

WARM_UP = 2
"""Rounds before the measured ones: each of the two slots has been written and mapped once."""
TARGET = 20.0
"""Times shorter than the vanilla way blocks."""
IMPORTS = [
    "benchmarks.engine_rank",
    "benchmarks.weight_sync",
    *(f"verl.workers.engine.{name}" for name in ("fsdp.fsdp1", "fsdp.fsdp2", "megatron.engine")),
]
COPIES = 8
"""Of the model at the peak: shards, packed shards, two slots, replica, receiver, and two gathered models."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    backend: str
    strategies: list[str]
    size_mib: float
    repeats: int


async def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds."""
    options = {contender.backend: contender.options for contender in CONTENDERS}.get(settings.backend, {})
    engine_kwargs = {settings.backend: options} if options else {}
    config = CheckpointEngineConfig(backend=settings.backend, engine_kwargs=engine_kwargs)
    resolve_backend(config)
    needed_nbytes = int(COPIES * settings.size_mib * 2**20)
    if needed_nbytes > available_nbytes():
        raise ConfigError(
            f"--size-mib {settings.size_mib} needs {needed_nbytes / 2**30:.1f} GiB of memory ({COPIES} times the "
            f"model); {available_nbytes() / 2**30:.1f} GiB are available"
        )
    machine = describe_machine()
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
        with HFCheckpoint(model) as checkpoint:
            specs = [
                TensorSpec(name=name, shape=checkpoint.shape(name), dtype="bfloat16")
                for name in sorted(checkpoint.names)
            ]
        measured = {name: await measure_strategy(name, model, specs, config, settings) for name in settings.strategies}
    return {
        "benchmark": "strategies",
        "settings": asdict(settings),
        "machine": machine,
        "model": {"nbytes": sum(spec.nbytes for spec in specs), "tensors": len(specs)},
        "ranks": RANKS,
        "target": TARGET,
        "strategies": measured,
    }


async def measure_strategy(
    strategy: str, model: Path, specs: Sequence[TensorSpec], config: CheckpointEngineConfig, settings: Settings
) -> dict[str, Any]:
    progress(f"{strategy}: building {RANKS} ranks")
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    # Forked from one process that has done the imports, once.
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
    ranks = [
        RankProcess(rank, partial(EngineRank, strategy, model, rank, store.port), config, start_method="forkserver")
        for rank in range(RANKS)
    ]
    node = RolloutNode(0, config, job=f"benchmark-{os.getpid()}-{strategy}", shm_dir=envs.shm_dir())
    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=[node])
    replica = CopyingReplica("replica", 0, list(specs))
    received = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs}
    samples = []
    try:
        await manager.add_replicas([replica])
        await asyncio.gather(*(rank.private_nbytes() for rank in ranks))  # fails if a rank could not build its engine
        group, *_ = await asyncio.gather(
            asyncio.to_thread(group_of_two, PrefixStore("receiver", store), 1),
            *(rank.call("meet_receiver") for rank in ranks),
        )
        for version in range(WARM_UP + settings.repeats):
            progress(f"{strategy}: version {version} of {WARM_UP + settings.repeats - 1}")
            sample = await one_round(version, manager, ranks, group, received)
            digest = require_same(strategy, replica.weights, received)
            if version >= WARM_UP:
                samples.append(sample)
    finally:
        await manager.close()
    summary = {key: median(sample[key] for sample in samples) for key in samples[0] if key != "version"}
    summary["shorter_by"] = summary["vanilla_s"] / summary["blocked_s"]
    return {
        "samples": samples,
        "summary": {**summary, "target_reached": summary["shorter_by"] >= TARGET},
        "digest": digest,
    }


async def one_round(
    version: int,
    manager: CheckpointEngineManager,
    ranks: Sequence[RankProcess],
    group: Any,
    received: dict[str, torch.Tensor],
) -> dict[str, float]:
    """Send the weights both ways; while a sync has them, the trainer goes on, until it changes them."""
    vanilla_s, *_ = await asyncio.gather(
        *(rank.call("broadcast") for rank in ranks), asyncio.to_thread(receive, group, received)
    )
    alone_s = max(await asyncio.gather(*(rank.call("compute_log_prob") for rank in ranks)))
    start_s, released_s = time.perf_counter(), asyncio.get_running_loop().create_future()
    syncing = asyncio.create_task(
        manager.update_weights(version, released=lambda: released_s.set_result(time.perf_counter() - start_s))
    )
    await asyncio.wait([released_s, syncing], return_when=asyncio.FIRST_COMPLETED)
    beside_s = max(await asyncio.gather(*(rank.call("compute_log_prob") for rank in ranks)))
    await asyncio.gather(*(rank.step() for rank in ranks))
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


def parse(arguments: list[str] | None) -> tuple[Settings, Path]:
    parser = make_parser("strategies", __doc__)
    add = parser.add_argument
    add("--backend", default="naive", help="checkpoint engine backend (default: %(default)s)")
    add("--strategies", nargs="+", default=list(STRATEGIES), help="training engines (default: all three)")
    add("--size-mib", type=float, default=512.0, help="of bfloat16 parameters (default: %(default)s)")
    add("--repeats", type=int, default=5, help="measured rounds, after the warm-up (default: %(default)s)")
    values = vars(parser.parse_args(arguments))
    output = values.pop("output")
    require_known(parser, "--strategies", values["strategies"], STRATEGIES)
    if not values["size_mib"] >= MIN_MIB:
        parser.error(f"--size-mib must be at least {MIN_MIB}, not {values['size_mib']}")
    if values["repeats"] < 1:
        parser.error(f"--repeats must be at least 1, not {values['repeats']}")
    return Settings(**values), output


def main(arguments: list[str] | None = None) -> int:
    settings, output = parse(arguments)
    torch.set_num_threads(1)
    return run(
        output,
        lambda: asyncio.run(measure(settings)),
        print_table=strategies_report.print_table,
        draw=strategies_report.draw,
    )


if __name__ == "__main__":
    sys.exit(main())
