"""What it saves to move what changed between two optimizer steps in place of the whole version.

    python -m benchmarks.deltas --learning-rates 1e-7 3e-7 1e-6 3e-6 --gbit-per-s 1 10 --nodes 1 5

The versions are those of a real model under AdamW. For each learning rate: how many values change, how many bits one
of them takes, how fast an owner publishes in full and with deltas and how fast a node applies them, one after the other
in one process. Then, with each of `--hosts-learning-rates`, whole syncs in full, with deltas, and with the choice left
to the job: between hosts (namespaces of this machine, links limited in both directions), and on one host (0 Gbit/s).
"""

from __future__ import annotations

import asyncio
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

from benchmarks import deltas_report
from benchmarks.command import make_parser, progress, run
from benchmarks.machine import available_nbytes, describe_machine
from benchmarks.namespaces import MAX_HOSTS, Host, NotPermitted, joined_hosts
from benchmarks.node_process import NodeProcess
from benchmarks.optimizer_steps import RecordedRank, record_versions
from benchmarks.rank_process import RankProcess
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.memory.delta import Applier, Deltas, DeltaWriter
from verl.checkpoint_engine.memory.digest import PieceDigests
from verl.checkpoint_engine.memory.packed import PackedRegion
from verl.checkpoint_engine.memory.publishing import publish
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager

VERSIONS = 4
WARM_UP = 6
"""Syncs before the measured ones: both slots have been written, and `auto` has seen full ones and warmed up."""
DELTA = ("off", "always", "auto")
TRAINERS = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    learning_rates: list[float]
    hosts_learning_rates: list[float]
    gbit_per_s: list[float]
    nodes: list[int]
    size_mib: float
    repeats: int


async def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds. Raises ConfigError, also without namespaces."""
    needed_nbytes = int(settings.size_mib * 2**20 * max(12 + VERSIONS, 5 + 3 * max(settings.nodes)))
    if needed_nbytes > available_nbytes():
        raise ConfigError(f"this takes {needed_nbytes / 2**30:.1f} GiB of memory; reduce --size-mib or --nodes")
    machine, codec, fleets = describe_machine(), [], []
    for rate in settings.learning_rates:
        with _recorded(settings, rate) as directory:
            codec.append({"learning_rate": rate} | _measure_codec(Path(directory), settings.repeats))
    for rate in settings.hosts_learning_rates:
        with _recorded(settings, rate) as directory:
            for gbit_per_s in settings.gbit_per_s:
                for count in settings.nodes:
                    ways = await _measure_ways(Path(directory), gbit_per_s, count, settings)
                    fleets.append({"learning_rate": rate, "gbit_per_s": gbit_per_s, "nodes": count, "ways": ways})
    return {
        "benchmark": "deltas",
        "settings": asdict(settings),
        "machine": machine,
        "codec": codec,
        "fleets": fleets,
    }


def _recorded(settings: Settings, rate: float) -> tempfile.TemporaryDirectory[str]:
    progress(f"training {settings.size_mib:g} MiB with a learning rate of {rate:g}")
    directory = tempfile.TemporaryDirectory(prefix="verl-deltas-")
    torch.set_num_threads(os.cpu_count() or 1)
    record_versions(Path(directory.name), size_mib=settings.size_mib, learning_rate=rate, versions=VERSIONS)
    torch.set_num_threads(1)
    return directory


def _measure_codec(directory: Path, repeats: int) -> dict[str, Any]:
    """One owner and one node without a wire. Rates are bytes of the model per second, of one thread."""
    source = RecordedRank(directory, 0, 1)
    layout = Layout.of(source.specs())
    plan = make_plan(layout, [ShardTable.of(layout, source.shards())], block_nbytes=2**20)
    region, full = PackedRegion(plan, 0), PackedRegion(plan, 0)
    writer = DeltaWriter(plan, 0, region.nbytes)
    publish(source, region)
    slots = [torch.zeros(layout.nbytes, dtype=torch.uint8).numpy() for _ in range(2)]
    samples = []
    for turn in range(repeats + 1):
        _to_slot(plan, region, slots[turn % 2])
        source.step()
        full_s = publish(source, full).seconds
        writer.begin()
        delta_s = publish(source, region, writer).seconds
        nbytes = writer.finish()
        arrived = PieceDigests.none_of(len(plan))
        deltas = Deltas.parse(plan, 0, writer.bytes[:nbytes])
        applier = Applier(plan, slots[turn % 2], slots[1 - turn % 2], arrived)
        start_s = time.perf_counter()
        wrong = applier.apply([deltas], threads=1, stopped=lambda: False)
        apply_s = time.perf_counter() - start_s
        expected = torch.zeros(layout.nbytes, dtype=torch.uint8).numpy()
        _to_slot(plan, region, expected)
        if wrong or not (expected == slots[1 - turn % 2]).all():
            raise ConfigError("what was applied is not what was published")
        if turn:
            changed = int(writer.changed.sum())
            samples.append(
                {
                    "changed_fraction": changed / (layout.payload_nbytes / 2),
                    "bits_per_change": 8 * nbytes / max(changed, 1),
                    "times_smaller": layout.payload_nbytes / nbytes,
                    "publish_full_gb_per_s": layout.payload_nbytes / full_s / 1e9,
                    "publish_delta_gb_per_s": layout.payload_nbytes / delta_s / 1e9,
                    "publish_delta_of_full": delta_s / full_s,
                    "apply_gb_per_s": layout.payload_nbytes / apply_s / 1e9,
                }
            )
    return _medians(samples)


def _to_slot(plan: Any, region: PackedRegion, slot: Any) -> None:
    packed = region.bytes.numpy()
    for (offset, nbytes, _, _), start in zip(
        plan.extents.of(range(len(plan))), region.packing.offset.tolist(), strict=True
    ):
        slot[offset : offset + nbytes] = packed[start : start + nbytes]


async def _measure_ways(directory: Path, gbit_per_s: float, nodes: int, settings: Settings) -> dict[str, Any]:
    if not gbit_per_s:
        here = [Here()] * (1 + nodes)
        return {delta: await _measure(delta, directory, here, settings) for delta in DELTA}
    try:
        with joined_hosts(1 + nodes, gbit_per_s=gbit_per_s) as hosts:
            return {delta: await _measure(delta, directory, hosts, settings) for delta in DELTA}
    except NotPermitted as exc:
        raise ConfigError(f"hosts cannot be made of this machine: {exc}; it takes root and iproute2") from exc


class Here:
    """This host, in place of one of several."""

    sent_nbytes = 0

    def enter(self) -> None:
        """Everybody is here already."""


async def _measure(delta: str, directory: Path, hosts: Sequence[Host | Here], settings: Settings) -> dict[str, float]:
    progress(f"{len(hosts) - 1} nodes; delta={delta}")
    topology = "chain" if len(hosts) > 2 and not isinstance(hosts[0], Here) else "direct"
    config = CheckpointEngineConfig.from_mapping({"backend": "tcp", "topology": topology, "delta": delta})
    ranks = [RankProcess(rank, partial(_rank_at, hosts[0], directory, rank), config) for rank in range(TRAINERS)]
    nodes = [
        NodeProcess(index, config, job=f"benchmark-{os.getpid()}", shm_dir=envs.shm_dir(), enter=host.enter)
        for index, host in enumerate(hosts[1:])
    ]
    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=nodes)
    samples = []
    try:
        for version in range(WARM_UP + settings.repeats):
            await asyncio.gather(*(rank.step() for rank in ranks))
            before = hosts[0].sent_nbytes
            report = await manager.update_weights(version)
            if version >= WARM_UP:
                seconds = report.phase_s
                samples.append(
                    {
                        "sync_s": sum(seconds[phase] for phase in ("publish", "stage", "verify", "commit")),
                        **{f"{phase}_s": seconds[phase] for phase in ("publish", "stage", "verify")},
                        "blocked_s": report.trainer_blocked_s,
                        "sent_mib": (hosts[0].sent_nbytes - before) / 2**20,
                        "was_delta": float(report.delta is not None and report.delta.way == "delta"),
                        "changed_fraction": report.delta.changed_fraction if report.delta else 0.0,
                        "predicted_full_s": report.delta.predicted_full_s if report.delta else 0.0,
                        "predicted_delta_s": report.delta.predicted_delta_s if report.delta else 0.0,
                    }
                )
    finally:
        await manager.close()
        for node in nodes:
            node.end()
    return _medians(samples)


def _rank_at(host: Host | Here, directory: Path, rank: int) -> RecordedRank:
    """In the rank's process, which lives at `host` from then on."""
    host.enter()
    return RecordedRank(directory, rank, TRAINERS)


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: median(sample[key] for sample in samples) for key in samples[0]}


def parse(arguments: list[str] | None) -> tuple[Settings, Path]:
    parser = make_parser("deltas", __doc__)
    add = parser.add_argument
    add("--learning-rates", nargs="*", type=float, default=[1e-7, 3e-7, 1e-6, 3e-6], help="of the codec's table")
    add("--hosts-learning-rates", nargs="*", type=float, default=[1.4e-6], help="of the syncs (default: 1.4e-6)")
    add("--gbit-per-s", nargs="*", type=float, default=[1.0, 10.0], help="of each link; 0: one host (default: 1, 10)")
    add("--nodes", nargs="+", type=int, default=[1, 5], help="rollout nodes, a host each (default: 1, then 5)")
    add("--size-mib", type=float, default=256.0, help="of the model in bfloat16 (default: %(default)s)")
    add("--repeats", type=int, default=3, help="measured versions (default: %(default)s)")
    values = vars(parser.parse_args(arguments))
    output = values.pop("output")
    if values["repeats"] < 1 or values["size_mib"] < 2:
        parser.error("--repeats must be at least 1, and --size-mib at least 2")
    if not all(1 <= count < MAX_HOSTS for count in values["nodes"]):
        parser.error(f"--nodes must be from 1 to {MAX_HOSTS - 1}")
    return Settings(**values), output


def main(arguments: list[str] | None = None) -> int:
    settings, output = parse(arguments)
    return run(
        output,
        lambda: asyncio.run(measure(settings)),
        print_table=deltas_report.print_table,
        draw=deltas_report.draw,
    )


if __name__ == "__main__":
    sys.exit(main())
