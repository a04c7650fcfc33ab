"""Every backend that runs here, the raw speed of its library, and what others do: `--backend all`.

One run, one machine, the same bytes. What belongs together is measured by turns: the library alone, one version through
the backend, the library alone again. A ratio is of one version to the two raw measurements around it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks.machine import Memcpy, describe_machine
from benchmarks.peers import PEERS, Job
from benchmarks.rank_process import RankProcess
from benchmarks.raw_gloo import GlooPair
from benchmarks.raw_one_sided import ReadPair
from benchmarks.synthetic_model import RowsOfModel
from verl import envs
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.manager import CheckpointEngineManager
from verl.checkpoint_engine.participants import RolloutNode
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.types import SyncReport

WARM_UP = 2
"""Versions before the measured ones: each of the two slots has been written once."""
STAGE_TARGET = 0.9
"""Of the library's raw speed."""
VERIFY_TARGET = 0.15
"""Of the seconds of a stage, at most."""
BLOCKED_TARGET = 20.0
"""Times shorter than under the gathered broadcast."""
BASELINE = "gathered broadcast"


class Raw(Protocol):
    """A library between two processes of this machine."""

    def gbytes_per_s(self) -> float: ...


@dataclass(frozen=True)
class Contender:
    """A backend, the options with which its members meet on one machine, and its library's raw speed."""

    backend: str
    options: dict[str, Any]
    raw: Callable[[int], AbstractContextManager[Raw]]
    raw_name: str
    digests_on_arrival: bool = False
    """Its stage does most of the verification, so it is measured without it, too."""


@contextmanager
def _memcpy(nbytes: int) -> Iterator[Raw]:
    memcpy = Memcpy(nbytes, 1)
    try:
        yield memcpy
    finally:
        memcpy.close()


CONTENDERS = (
    Contender("naive", {}, _memcpy, "memcpy, one thread"),
    Contender("gloo", {"interface": "lo"}, GlooPair, "gloo broadcast, 64 MiB buckets"),
    Contender("nixl", {}, lambda nbytes: ReadPair("nixl", nbytes), "NIXL read", digests_on_arrival=True),
    Contender("mooncake", {"host": "127.0.0.1"}, lambda nbytes: ReadPair("mooncake", nbytes), "Mooncake read"),
    Contender("kimi_ckpt_engine", {"host": "127.0.0.1"}, lambda nbytes: ReadPair("mooncake", nbytes), "Mooncake read"),
)


async def compare(job: Job, repeats: int, block_kilobytes: int) -> dict[str, Any]:
    """Everything that the JSON file holds. Says on the console what it is doing: it takes minutes."""
    nbytes = sum(spec.nbytes for spec in job.specs)
    machine = describe_machine()
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
            print(f"left out: {exc}", flush=True)
            continue
        print(f"measuring {contender.backend} against {contender.raw_name}", flush=True)
        backends[contender.backend] = await _measure(contender, config, job, nbytes, repeats)
    peers: dict[str, Any] = {}
    for peer in PEERS:
        with peer(job) as ways:
            for name, way in ways.items():
                print(f"measuring {name}", flush=True)
                samples = [asdict(way()) for _ in range(1 + repeats)][1:]
                peers[name] = {"samples": samples, "summary": _medians(samples)}
    return {
        "benchmark": "weight_sync_comparison",
        "settings": {**{key: value for key, value in asdict(job).items() if key != "specs"}, "repeats": repeats},
        "machine": machine,
        "model": {"nbytes": nbytes, "tensors": len(job.specs)},
        "backends": backends,
        "unavailable": unavailable,
        "peers": peers,
        "targets": targets(backends, peers, job.nodes),
    }


async def _measure(
    contender: Contender, config: CheckpointEngineConfig, job: Job, nbytes: int, repeats: int
) -> dict[str, Any]:
    specs = list(job.specs)
    ranks = [
        RankProcess(rank, partial(RowsOfModel, specs, rank, job.trainers, job.source_dtype), config)
        for rank in range(job.trainers)
    ]
    name = f"benchmark-{os.getpid()}-{contender.backend}"
    nodes = [RolloutNode(index, config, job=name, shm_dir=envs.shm_dir()) for index in range(job.nodes)]
    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=nodes)
    unverified = replace(config, verify=False)
    more_nodes = [
        RolloutNode(index, unverified, job=f"{name}-unverified", shm_dir=envs.shm_dir())
        for index in range(job.nodes if contender.digests_on_arrival else 0)
    ]
    second = CheckpointEngineManager(config=unverified, trainers=ranks, nodes=more_nodes) if more_nodes else None
    samples = []
    try:
        own_nbytes = max([await rank.private_nbytes() for rank in ranks])
        with contender.raw(nbytes) as raw:
            for version in range(WARM_UP + repeats):
                await asyncio.gather(*(rank.step() for rank in ranks))
                before = raw.gbytes_per_s()
                report = await manager.update_weights(version)
                stage_s = (await second.update_weights(version)).phase_s["stage"] if second else None
                if version >= WARM_UP:
                    samples.append(_sample(report, stage_s, nbytes, (before, raw.gbytes_per_s())))
        grown_nbytes = max([await rank.private_nbytes() for rank in ranks]) - own_nbytes
    finally:
        await asyncio.gather(*(node.close() for node in more_nodes))
        await manager.close()
    return {
        "raw": contender.raw_name,
        "samples": samples,
        "summary": _medians(samples),
        "extra_copies_of_own_shards": grown_nbytes / (nbytes / job.trainers),
    }


def _sample(
    report: SyncReport, unverified_stage_s: float | None, nbytes: int, raw: Sequence[float]
) -> dict[str, float]:
    """`transfer_s` is what the raw library would do: the stage, or publishing where that is all there is.

    Of a stage that digests what arrives, it is that of a version without verification; the rest is `verify_s`.
    """
    seconds = report.phase_s
    staged = report.backend != "naive"
    transfer_s = seconds["stage"] if staged else seconds["publish"] + seconds["stage"]
    verify_s = seconds["verify"]
    if unverified_stage_s is not None:
        verify_s += transfer_s - unverified_stage_s
        transfer_s = unverified_stage_s
    raw_gbytes_per_s = sum(raw) / len(raw)
    rate = nbytes / transfer_s / 1e9
    return {
        "version": report.version,
        "raw_gbytes_per_s": raw_gbytes_per_s,
        "blocked_s": report.trainer_blocked_s,
        "publish_s": seconds["publish"],
        "transfer_s": transfer_s,
        "transfer_gbytes_per_s": rate,
        "transfer_of_raw": rate / raw_gbytes_per_s,
        "verify_s": verify_s,
        "verify_of_transfer": verify_s / transfer_s,
        "total_s": report.total_s,
    }


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: median(sample[key] for sample in samples) for key in samples[0] if key != "version"}


def targets(backends: dict[str, Any], peers: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Per backend, each target's value and whether it is reached.

    `naive` has no stage of its own. With several nodes a stage is not what the library does between two processes.
    """
    baseline = peers[BASELINE]["summary"]["blocked_s"]
    found: dict[str, Any] = {}
    for name, measured in backends.items():
        summary = measured["summary"]
        shorter = baseline / summary["blocked_s"]
        rows = {"blocked_shorter_by": (shorter, BLOCKED_TARGET, shorter >= BLOCKED_TARGET)}
        if name != "naive" and nodes == 1:
            of_raw, of_stage = summary["transfer_of_raw"], summary["verify_of_transfer"]
            rows["stage_of_raw"] = (of_raw, STAGE_TARGET, of_raw >= STAGE_TARGET)
            rows["verify_of_stage"] = (of_stage, VERIFY_TARGET, of_stage < VERIFY_TARGET)
        found[name] = {key: dict(zip(("value", "target", "reached"), row, strict=True)) for key, row in rows.items()}
    return found


def needed_nbytes(job: Job) -> int:
    """Memory at the peak of any part: the ranks' weights and packed copies, four slots per node, the raw pair."""
    nbytes = sum(spec.nbytes for spec in job.specs)
    itemsize = getattr(torch, job.source_dtype).itemsize / getattr(torch, job.specs[0].dtype).itemsize
    return int(nbytes * (itemsize + 3 + 4 * job.nodes))
