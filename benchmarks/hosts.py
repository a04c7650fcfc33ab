"""How long a version takes from a trainer's host to rollout nodes on other hosts, over links of a given speed.

    python -m benchmarks.hosts --gbit-per-s 1 --size-gib 0.25 --nodes 1 3 5

The hosts are network namespaces of this machine on a bridge, each link limited in both directions: what counts on a
cluster, the bytes on each link and who waits for whom, is real; the processors are shared. Needs root and iproute2.

Beside the backends: what one plain TCP connection carries, and the gathered broadcast of most frameworks. On several
nodes the least possible time is that of one copy over one link.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import hosts_report
from benchmarks.command import make_parser, progress, require_known, run
from benchmarks.comparison import BASELINE
from benchmarks.machine import available_nbytes, describe_machine
from benchmarks.namespaces import MAX_HOSTS, Host, NotPermitted, joined_hosts
from benchmarks.node_process import NodeProcess
from benchmarks.peers import Job, gathering
from benchmarks.rank_process import RankProcess, SteppingSource
from benchmarks.raw_tcp import gbit_per_s
from benchmarks.synthetic_model import MIN_NBYTES, RowsOfModel, qwen_like_specs
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import BackendUnavailable, ConfigError
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager

WARM_UP = 2
"""Versions before the measured ones: each of the two slots has been written once."""
OVER_TCP = {"nixl": {"ucx_tls": "tcp"}}
"""UCX sees through namespaces: it would find that both ends share memory."""
WAYS: dict[str, dict[str, Any]] = {
    "gloo": {"backend": "gloo"},
    "kimi_ckpt_engine": {"backend": "kimi_ckpt_engine"},
    "mooncake": {"backend": "mooncake"},
    "mooncake-chain": {"backend": "mooncake", "topology": "chain"},
    "tcp": {"backend": "tcp"},
    "tcp-chain": {"backend": "tcp", "topology": "chain"},
    "tcp-tree": {"backend": "tcp", "topology": "tree"},
    "tcp-p2p_broadcast": {"backend": "tcp", "topology": "p2p_broadcast"},
    "nixl": {"backend": "nixl", "engine_kwargs": OVER_TCP},
    "nixl-chain": {"backend": "nixl", "engine_kwargs": OVER_TCP, "topology": "chain"},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    ways: list[str]
    gbit_per_s: float
    size_gib: float
    trainers: int
    nodes: list[int]
    repeats: int


async def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds. Says on the console what it is doing: it takes minutes.

    Raises ConfigError, also where namespaces cannot be made.
    """
    specs = qwen_like_specs(int(settings.size_gib * 2**30), "bfloat16")
    nbytes = sum(spec.nbytes for spec in specs)
    _require_memory(settings, nbytes)
    machine = describe_machine()
    configs, unavailable = {}, {}
    for name in settings.ways:
        config = CheckpointEngineConfig.from_mapping(WAYS[name])
        try:
            resolve_backend(config)
            configs[name] = config
        except BackendUnavailable as exc:
            unavailable[name] = str(exc)
    fleets = []
    for count in settings.nodes:
        job = Job(specs=specs, source_dtype="bfloat16", trainers=settings.trainers, nodes=count)
        try:
            with joined_hosts(1 + count, gbit_per_s=settings.gbit_per_s) as hosts:
                fleets.append(await _measure_fleet(configs, job, hosts, settings.repeats, nbytes))
        except NotPermitted as exc:
            raise ConfigError(
                f"several hosts cannot be made of this machine: {exc}; it takes root and iproute2"
            ) from exc
    return {
        "benchmark": "hosts",
        "settings": asdict(settings),
        "machine": machine,
        "model": {"nbytes": nbytes, "tensors": len(specs)},
        "fleets": fleets,
        "unavailable": unavailable,
    }


async def _measure_fleet(
    configs: Mapping[str, CheckpointEngineConfig], job: Job, hosts: Sequence[Host], repeats: int, nbytes: int
) -> dict[str, Any]:
    """Every way beside plain TCP, with one number of nodes."""
    progress(f"nodes: {job.nodes}; measuring plain TCP")
    ceiling = gbit_per_s(hosts[0], hosts[1], nbytes)
    ways: dict[str, Any] = {}
    for name, config in configs.items():
        progress(f"nodes: {job.nodes}; measuring {name}")
        samples = await _measure(config, job, hosts, repeats, nbytes)
        ways[name] = {"samples": samples, "summary": _medians(samples)}
    progress(f"nodes: {job.nodes}; measuring {BASELINE}")
    ways[BASELINE] = _measure_baseline(job, hosts, repeats, nbytes)
    return {"nodes": job.nodes, "tcp_gbit_per_s": ceiling, "ways": ways}


async def _measure(
    config: CheckpointEngineConfig, job: Job, hosts: Sequence[Host], repeats: int, nbytes: int
) -> list[dict[str, float]]:
    ranks = [RankProcess(rank, partial(_rows_at, hosts[0], job, rank), config) for rank in range(job.trainers)]
    nodes = [
        NodeProcess(index, config, job=f"benchmark-{os.getpid()}", shm_dir=envs.shm_dir(), enter=host.enter)
        for index, host in enumerate(hosts[1:])
    ]
    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=nodes)
    samples = []
    try:
        for version in range(WARM_UP + repeats):
            await asyncio.gather(*(rank.step() for rank in ranks))
            before = hosts[0].sent_nbytes
            report = await manager.update_weights(version)
            if version < WARM_UP:
                continue
            samples.append(
                {
                    "version": version,
                    "blocked_s": report.trainer_blocked_s,
                    "stage_s": report.phase_s["stage"],
                    "verify_s": report.phase_s["verify"],
                    "total_s": report.total_s,
                    "sent_in_models": (hosts[0].sent_nbytes - before) / nbytes,
                }
            )
    finally:
        await manager.close()
        for node in nodes:
            node.end()
    return samples


def _rows_at(host: Host, job: Job, rank: int) -> SteppingSource:
    """In the rank's process, which lives at `host` from then on."""
    host.enter()
    return RowsOfModel(list(job.specs), rank, job.trainers, job.source_dtype)


def _measure_baseline(job: Job, hosts: Sequence[Host], repeats: int, nbytes: int) -> dict[str, Any]:
    samples = []
    with gathering(job, hosts) as ways:
        for turn in range(1 + repeats):
            before = hosts[0].sent_nbytes
            sample = ways[BASELINE]()
            if turn:
                samples.append({**asdict(sample), "sent_in_models": (hosts[0].sent_nbytes - before) / nbytes})
    return {"samples": samples, "summary": _medians(samples)}


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: median(sample[key] for sample in samples) for key in samples[0] if key != "version"}


def _require_memory(settings: Settings, nbytes: int) -> None:
    """The ranks' weights and packed copies, and of every node two slots or the baseline's private copy."""
    needed_nbytes = nbytes * (3 + 2 * max(settings.nodes))
    if needed_nbytes > available_nbytes():
        raise ConfigError(
            f"--size-gib {settings.size_gib} and {max(settings.nodes)} nodes need {needed_nbytes / 2**30:.1f} GiB of "
            f"memory; {available_nbytes() / 2**30:.1f} GiB are available"
        )


def parse(arguments: list[str] | None) -> tuple[Settings, Path]:
    parser = make_parser("hosts", __doc__)
    add = parser.add_argument
    add("--ways", nargs="+", default=list(WAYS), help=f"some of {', '.join(WAYS)} (default: all)")
    add("--gbit-per-s", type=float, default=1.0, help="of each host's link, in each direction (default: %(default)s)")
    add("--size-gib", type=float, default=0.25, help="model size in bfloat16 (default: %(default)s)")
    add("--trainers", type=int, default=2, help="trainer ranks, all on one host (default: %(default)s)")
    add(
        "--nodes",
        nargs="+",
        type=int,
        default=[1, 3, 5],
        help="rollout nodes, a host each (default: 1, then 3, then 5)",
    )
    add("--repeats", type=int, default=3, help="measured versions, after the warm-up (default: %(default)s)")
    values = vars(parser.parse_args(arguments))
    output = values.pop("output")
    require_known(parser, "--ways", values["ways"], WAYS)
    if not values["size_gib"] * 2**30 >= MIN_NBYTES:
        parser.error(f"--size-gib must be at least {MIN_NBYTES / 2**30:.6f} (1 MiB), not {values['size_gib']}")
    if not 0.01 <= values["gbit_per_s"] <= 1000:
        parser.error(f"--gbit-per-s must be from 0.01 to 1000, not {values['gbit_per_s']}")
    for name in ("trainers", "repeats"):
        if values[name] < 1:
            parser.error(f"--{name} must be at least 1, not {values[name]}")
    if not all(1 <= count < MAX_HOSTS for count in values["nodes"]):
        parser.error(f"--nodes must be from 1 to {MAX_HOSTS - 1}")
    return Settings(**values | {"nodes": sorted(set(values["nodes"]))}), output


def main(arguments: list[str] | None = None) -> int:
    settings, output = parse(arguments)
    torch.set_num_threads(1)
    return run(
        output,
        lambda: asyncio.run(measure(settings)),
        print_table=hosts_report.print_table,
        draw=hosts_report.draw,
    )


if __name__ == "__main__":
    sys.exit(main())
