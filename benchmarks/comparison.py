"""Every backend that runs here, the raw speed of its library, and what others do: `--backend all`.

One run, one machine, the same bytes. What belongs together is measured by turns: the library alone, one version through
the backend, the library alone again. A ratio is of one version to the two raw measurements around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks import raw
from benchmarks.command import progress
from benchmarks.fleet import on_one_host
from benchmarks.peers import BASELINE, PEERS, Job
from benchmarks.report import Panel, Report, medians, table, target, verdict
from benchmarks.synthetic_model import row_sources
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager

WARM_UP = 2
"""Versions before the measured ones: each of the two slots has been written once."""
STAGE_TARGET = 0.9
"""Of the library's raw speed."""
VERIFY_TARGET = 0.15
"""Of the seconds of a stage, at most."""
BLOCKED_TARGET = 20.0
"""Times shorter than under the gathered broadcast."""


@dataclass(frozen=True)
class Contender:
    """A backend, the options with which its members meet on one machine, and its library's raw speed."""

    backend: str
    options: dict[str, Any]
    raw: Callable[[int], AbstractContextManager[raw.Speed]]
    raw_name: str
    verify: tuple[bool, ...] = (True,)
    """With False, versions without verification are measured, too: its stage does most of it."""


_MOONCAKE = partial(raw.reads, "mooncake")
CONTENDERS = (
    Contender("naive", {}, raw.memcpy, "memcpy, one thread"),
    Contender("gloo", {"interface": "lo"}, raw.gloo, "gloo broadcast, 64 MiB buckets"),
    Contender("tcp", {"host": "127.0.0.1"}, partial(raw.reads, "tcp"), "TCP read"),
    Contender("nixl", {}, partial(raw.reads, "nixl"), "NIXL read", verify=(True, False)),
    Contender("mooncake", {"host": "127.0.0.1"}, _MOONCAKE, "Mooncake read"),
    Contender("kimi_ckpt_engine", {"host": "127.0.0.1"}, _MOONCAKE, "Mooncake read"),
)


async def compare(job: Job, repeats: int, block_kilobytes: int) -> dict[str, Any]:
    """Everything that the JSON file holds. Says on the console what it is doing: it takes minutes."""
    nbytes = sum(spec.nbytes for spec in job.specs)
    backends, unavailable = {}, {}
    for contender in CONTENDERS:
        config = CheckpointEngineConfig(
            backend=contender.backend,
            block_kilobytes=block_kilobytes,
            engine_kwargs={contender.backend: contender.options},
        )
        try:
            resolve_backend(config)
        except BackendUnavailable as exc:
            unavailable[contender.backend] = str(exc)
            continue
        progress(f"measuring {contender.backend} against {contender.raw_name}")
        backends[contender.backend] = await _measure(contender, config, job, nbytes, repeats)
    peers: dict[str, Any] = {}
    for peer in PEERS:
        with peer(job) as ways:
            for name, way in ways.items():
                progress(f"measuring {name}")
                samples = [asdict(way()) for _ in range(1 + repeats)][1:]
                peers[name] = {"samples": samples, "summary": medians(samples)}
    return {
        "model": {"nbytes": nbytes, "tensors": len(job.specs)},
        "backends": backends,
        "unavailable": unavailable,
        "peers": peers,
        "targets": targets(backends, peers, job.nodes),
    }


async def _measure(
    contender: Contender, config: CheckpointEngineConfig, job: Job, nbytes: int, repeats: int
) -> dict[str, Any]:
    sources = row_sources(list(job.specs), job.trainers, job.source_dtype)
    kinds = {verify: replace(config, verify=verify) for verify in contender.verify}
    samples = []
    async with on_one_host(config, sources, job.nodes) as fleet:
        managers = {True: fleet.manager}
        if False in kinds:
            managers[False] = CheckpointEngineManager(config=kinds[False], trainers=fleet.ranks, nodes=fleet.nodes)
        own_nbytes = max(await fleet.of_ranks("private_nbytes"))
        with contender.raw(nbytes) as gbytes_per_s:
            for version in range(WARM_UP + repeats):
                await fleet.of_ranks("step")
                before = gbytes_per_s()
                reports = {}
                # By turns: versions alternate between two slots, and no two are equally fast.
                for turn, verify in enumerate(contender.verify if version % 2 else contender.verify[::-1]):
                    for node in fleet.nodes:
                        node._engine.config = kinds[verify]
                    reports[verify] = await managers[verify].update_weights(2 * version + turn)
                samples.append(_sample(reports, nbytes, (before + gbytes_per_s()) / 2))
        grown_nbytes = max(await fleet.of_ranks("private_nbytes")) - own_nbytes
    samples = samples[WARM_UP:]
    return {
        "raw": contender.raw_name,
        "samples": samples,
        "summary": medians(samples),
        "extra_copies_of_own_shards": grown_nbytes / (nbytes / job.trainers),
    }


def _sample(reports: Mapping[bool, SyncReport], nbytes: int, raw_gbytes_per_s: float) -> dict[str, float]:
    """Of a version that was verified, and perhaps of one that was not.

    `transfer_s` is what the raw library would do: the stage, or publishing where that is all there is.
    `verification_s` is what a version takes longer because it is verified: the phase `verify`, and what a stage takes
    longer with verification than without. A difference of two measurements may come out negative.
    """
    report = reports[True]
    seconds = report.phase_s
    staged = report.backend != "naive"
    transfer_s = seconds["stage"] if staged else seconds["publish"] + seconds["stage"]
    verification_s = seconds["verify"]
    if False in reports:
        stage_s = reports[False].phase_s["stage"]
        verification_s, transfer_s = verification_s + transfer_s - stage_s, stage_s
    rate = nbytes / transfer_s / 1e9
    return {
        "version": report.version,
        "raw_gbytes_per_s": raw_gbytes_per_s,
        "blocked_s": report.trainer_blocked_s,
        "publish_s": seconds["publish"],
        "transfer_s": transfer_s,
        "transfer_gbytes_per_s": rate,
        "transfer_of_raw": rate / raw_gbytes_per_s,
        "verify_s": seconds["verify"],
        "verification_s": verification_s,
        "verify_of_transfer": verification_s / transfer_s,
        "total_s": report.total_s,
    }


def targets(backends: dict[str, Any], peers: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Per backend, each target's value and whether it is reached.

    `naive` has no stage of its own. With several nodes a stage is not what the library does between two processes.
    """
    baseline = peers[BASELINE]["summary"]["blocked_s"]
    found: dict[str, Any] = {}
    for name, measured in backends.items():
        summary = measured["summary"]
        rows = {"blocked_shorter_by": target(baseline / summary["blocked_s"], BLOCKED_TARGET, "at least")}
        if name != "naive" and nodes == 1:
            rows["stage_of_raw"] = target(summary["transfer_of_raw"], STAGE_TARGET, "at least")
            rows["verify_of_stage"] = target(summary["verify_of_transfer"], VERIFY_TARGET, "below")
        found[name] = rows
    return found


def needed_nbytes(job: Job) -> int:
    """Memory at the peak of any part: the ranks' weights and packed copies, two slots per node, and the raw pair."""
    nbytes = sum(spec.nbytes for spec in job.specs)
    itemsize = getattr(torch, job.source_dtype).itemsize / getattr(torch, job.specs[0].dtype).itemsize
    return int(nbytes * (itemsize + 3 + 2 * job.nodes))


TARGETS = {
    "stage_of_raw": ("stage / raw library", "{:.0%}"),
    "verify_of_stage": ("verify / stage", "{:.0%}"),
    "blocked_shorter_by": ("trainer blocked, times shorter than under the gathered broadcast", "{:.0f}"),
}
COLUMNS = {
    "": "{way}",
    "blocked s": "{blocked_s:.3f}",
    "transfer s": "{transfer_s:.3f}",
    "GB/s": "{transfer_gbytes_per_s:.2f}",
    "raw GB/s": "{raw_gbytes_per_s:.2f}",
    "of raw": "{transfer_of_raw:.0%}",
    "verify s": "{verification_s:.3f}",
    "total s": "{total_s:.3f}",
    "extra copies": "{extra:.2f}",
}


def report(result: dict[str, Any]) -> Report:
    settings, nbytes = result["settings"], result["model"]["nbytes"]
    title = (
        f"{nbytes / 2**30:.2f} GiB from {settings['source_dtype']}; trainer ranks: {settings['trainers']}, "
        f"nodes: {settings['nodes']}; medians of {settings['repeats']}"
    )
    rows = [
        {"way": name, **measured["summary"], "extra": measured["extra_copies_of_own_shards"]}
        for name, measured in result["backends"].items()
    ]
    nothing = dict.fromkeys(("transfer_s", "raw_gbytes_per_s", "transfer_of_raw", "verification_s", "extra"))
    for name, measured in result["peers"].items():
        row = measured["summary"]
        rows.append({"way": name, **nothing, **row, "transfer_gbytes_per_s": nbytes / row["total_s"] / 1e9})
    verdicts = [
        f"{name}: {verdict(*TARGETS[key], row)}"
        for name, found in result["targets"].items()
        for key, row in found.items()
    ]
    left_out = [f"left out: {reason}" for reason in result["unavailable"].values()]
    labels = {"total_s": "until every node has every byte", "blocked_s": "trainer blocked"}
    series = {label: [(row["way"], row[key]) for row in rows] for key, label in labels.items()}
    panel = Panel(kind="bars", series=series, x="seconds")
    return Report([table(title, COLUMNS, rows), "\n".join([*verdicts, *left_out])], [panel], title)
