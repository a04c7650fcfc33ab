"""What it saves to move what changed between two optimizer steps in place of the whole version.

    python -m benchmarks.deltas --learning-rates 1e-7 3e-7 1e-6 3e-6 --gbit-per-s 1 10 --nodes 1 5

The versions are those of a real model under AdamW. For each learning rate: how many values change, how many bits one
of them takes, how fast an owner publishes in full and with deltas and how fast a node applies them, one after the other
in one process. Then, with each of `--hosts-learning-rates`, whole syncs in full, with deltas, and with the choice left
to the job: between hosts (namespaces of this machine, links limited in both directions), and on one host (0 Gbit/s).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.applied import apply_s, in_slot
from benchmarks.command import program, progress
from benchmarks.fleet import on_hosts
from benchmarks.machine import require_memory
from benchmarks.namespaces import MAX_HOSTS, Host, joined_hosts
from benchmarks.optimizer_steps import RecordedRank, record_versions
from benchmarks.report import Panel, Report, medians, table
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.memory.delta import DeltaWriter
from verl.checkpoint_engine.memory.packed import PackedRegion
from verl.checkpoint_engine.memory.publishing import publish
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.utils.config import ConfigError, option

VERSIONS = 4
WARM_UP = 6
"""Syncs before the measured ones: both slots have been written, and `auto` has seen full ones and warmed up."""
DELTA = {"off": "full", "always": "delta", "auto": "auto"}
"""The option of a job, and what it sends."""
SAME = 0.1
"""Of the longer sync: the ways are equally good."""
TRAINERS = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    learning_rates: list[float] = option([1e-7, 3e-7, 1e-6, 3e-6], "of the codec's table")
    hosts_learning_rates: list[float] = option([1.4e-6], "of the syncs")
    gbit_per_s: list[float] = option([1.0, 10.0], "of each link; 0: one host", least=0)
    delay_ms: float = option(0.0, "of a packet from host to host", least=0)
    loss: float = option(0.0, "share of packets that get lost on the way", least=0, most=0.5)
    ways: list[str] = option(list(DELTA), "of the syncs, as checkpoint_engine.delta", choices=tuple(DELTA))
    nodes: list[int] = option([1, 5], "rollout nodes, a host each", least=1, most=MAX_HOSTS - 1)
    size_mib: float = option(256.0, "of the model in bfloat16", least=2)
    repeats: int = option(3, "measured versions", least=1)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("--nodes takes at least one number")


async def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds. Raises ConfigError, NotPermitted."""
    copies = max(12 + VERSIONS, 5 + 3 * max(settings.nodes))
    require_memory(settings.size_mib * 2**20 * copies, f"--size-mib {settings.size_mib:g} with these --nodes")
    codec, fleets = [], []
    for rate in settings.learning_rates:
        with _recorded(settings, rate) as directory:
            codec.append({"learning_rate": rate} | _measure_codec(Path(directory), settings.repeats))
    for rate in settings.hosts_learning_rates:
        with _recorded(settings, rate) as directory:
            for gbit_per_s in settings.gbit_per_s:
                for count in settings.nodes:
                    ways = await _measure_ways(Path(directory), gbit_per_s, count, settings)
                    fleets.append({"learning_rate": rate, "gbit_per_s": gbit_per_s, "nodes": count, "ways": ways})
    return {"codec": codec, "fleets": fleets}


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
    samples = []
    for turn in range(repeats + 1):
        base = in_slot(plan, region)
        source.step()
        full_s = publish(source, full).seconds
        writer.begin()
        delta_s = publish(source, region, writer).seconds
        nbytes = writer.finish()
        applied_s = apply_s(plan, base, writer.bytes[:nbytes], region, threads=1)
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
                    "apply_gb_per_s": layout.payload_nbytes / applied_s / 1e9,
                }
            )
    return medians(samples)


async def _measure_ways(directory: Path, gbit_per_s: float, nodes: int, settings: Settings) -> dict[str, Any]:
    async def measured(hosts: Sequence[Host | None]) -> dict[str, Any]:
        return {delta: await _measure(delta, directory, hosts, settings.repeats) for delta in settings.ways}

    if not gbit_per_s:
        return await measured([None] * (1 + nodes))
    delay_s, loss = settings.delay_ms / 1000, settings.loss
    with joined_hosts(1 + nodes, gbit_per_s=gbit_per_s, delay_s=delay_s, loss=loss) as hosts:
        return await measured(hosts)


async def _measure(delta: str, directory: Path, hosts: Sequence[Host | None], repeats: int) -> dict[str, float]:
    """`hosts`: of the ranks, and of each node; None where all are on this one."""
    progress(f"{len(hosts) - 1} nodes; delta={delta}")
    topology = "chain" if len(hosts) > 2 and hosts[0] is not None else "direct"
    config = CheckpointEngineConfig.from_mapping({"backend": "tcp", "topology": topology, "delta": delta})
    sources = [partial(RecordedRank, directory, rank, TRAINERS) for rank in range(TRAINERS)]

    def sent_nbytes() -> int:
        return hosts[0].sent_nbytes if hosts[0] is not None else 0

    samples = []
    async with on_hosts(config, sources, hosts) as fleet:
        for version in range(WARM_UP + repeats):
            await fleet.of_ranks("step")
            before = sent_nbytes()
            report = await fleet.manager.update_weights(version)
            seconds, chosen = report.phase_s, report.delta
            samples.append(
                {
                    "sync_s": sum(seconds[phase] for phase in ("publish", "stage", "verify", "commit")),
                    **{f"{phase}_s": seconds[phase] for phase in ("publish", "stage", "verify")},
                    "blocked_s": report.trainer_blocked_s,
                    "sent_mib": (sent_nbytes() - before) / 2**20,
                    "was_delta": float(chosen is not None and chosen.way == "delta"),
                    "changed_fraction": chosen.changed_fraction if chosen else 0.0,
                    "predicted_full_s": chosen.predicted_full_s if chosen else 0.0,
                    "predicted_delta_s": chosen.predicted_delta_s if chosen else 0.0,
                }
            )
    return medians(samples[WARM_UP:])


def auto_was_right(fleet: dict[str, Any]) -> bool:
    """Whether the choice was that of the shorter syncs, of the two ways measured beside it."""
    full_s, delta_s = float(fleet["ways"]["off"]["sync_s"]), float(fleet["ways"]["always"]["sync_s"])
    if abs(full_s - delta_s) <= SAME * max(full_s, delta_s):
        return True
    return bool(fleet["ways"]["auto"]["was_delta"]) == (delta_s < full_s)


CODEC = {
    "learning rate": "{learning_rate:g}",
    "values changed": "{changed_fraction:.2%}",
    "bits for each": "{bits_per_change:.1f}",
    "smaller": "{times_smaller:.0f}x",
    "full, GB/s": "{publish_full_gb_per_s:.1f}",
    "delta, GB/s": "{publish_delta_gb_per_s:.1f}",
    "apply, GB/s": "{apply_gb_per_s:.1f}",
}
SYNCS = {
    "changed": "{changed:.2%}",
    "link, Gbit/s": "{gbit_per_s:g}",
    "nodes": "{nodes}",
    "way": "{name}",
    **{f"{name}, s": f"{{{name}_s:.3f}}" for name in ("publish", "stage", "verify", "sync", "blocked")},
    "sent, MiB": "{sent_mib:.1f}",
    "faster": "{faster:.1f}x",
}


def report(result: dict[str, Any]) -> Report:
    """Bits of a change over how much changed, and how long syncs take."""
    settings, fleets = result["settings"], result["fleets"]
    rows = []
    for fleet in fleets:
        full = fleet["ways"].get("off")
        fleet["changed"] = max(row["changed_fraction"] for row in fleet["ways"].values())
        for way, row in fleet["ways"].items():
            rows.append({**fleet, **row, "name": DELTA[way], "faster": full and full["sync_s"] / row["sync_s"]})
    right = [auto_was_right(fleet) for fleet in fleets if fleet["ways"].keys() == DELTA.keys()]
    bits = sorted((100 * row["changed_fraction"], row["bits_per_change"]) for row in result["codec"])
    syncs = {name: [(_place(row), row["sync_s"]) for row in rows if row["name"] == name] for name in DELTA.values()}
    of_codec = f"{settings['size_mib']:g} MiB of bfloat16 after one step of AdamW; one thread"
    links = f"{settings['delay_ms']:g} ms, {settings['loss']:.0%} lost"
    tables = [
        (of_codec, CODEC, result["codec"]),
        (f"syncs, backend tcp; a link of 0: one host; packets: {links}", SYNCS, rows),
    ]
    return Report(
        [
            *(table(title, columns, shown) for title, columns, shown in tables if shown),
            f"auto took the faster way, or one as fast within {SAME:.0%}: {sum(right)} of {len(right)}\n"
            f"medians of {settings['repeats']}; the cores are those of all hosts",
        ],
        [
            Panel(kind="lines", series={"AdamW": bits}, x="values that changed, %", y="bits for each", scale="log"),
            Panel(kind="bars", series=syncs, x="seconds from publish to commit"),
        ],
    )


def _place(row: dict[str, Any]) -> str:
    return f"{row['changed']:.1%}, {row['gbit_per_s']:g} Gbit/s, to {row['nodes']}"


main = program("deltas", __doc__, Settings, measure, report)
if __name__ == "__main__":
    sys.exit(main())
