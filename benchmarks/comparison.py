"""Every backend that runs here, the raw speed of its library, and what others do: `--backend all`.

One run, one machine, the same bytes. What belongs together is measured by turns: the library alone, one version through
the backend, the library alone again. A ratio is of one version to the two raw measurements around it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode

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
    verify: tuple[bool, ...] = (True,)
    """With False, versions without verification are measured, too: its stage does most of it."""


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
    Contender("tcp", {"host": "127.0.0.1"}, lambda nbytes: ReadPair("tcp", nbytes), "TCP read"),
    Contender("nixl", {}, lambda nbytes: ReadPair("nixl", nbytes), "NIXL read", verify=(True, False)),
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
    kinds = {verify: replace(config, verify=verify) for verify in contender.verify}
    managers = {
        verify: CheckpointEngineManager(config=kind, trainers=ranks, nodes=nodes) for verify, kind in kinds.items()
    }
    samples = []
    try:
        own_nbytes = max([await rank.private_nbytes() for rank in ranks])
        with contender.raw(nbytes) as raw:
            for version in range(WARM_UP + repeats):
                await asyncio.gather(*(rank.step() for rank in ranks))
                before = raw.gbytes_per_s()
                reports = {}
                # By turns: versions alternate between two slots, and no two are equally fast.
                for turn, verify in enumerate(contender.verify if version % 2 else contender.verify[::-1]):
                    for node in nodes:
                        node._engine.config = kinds[verify]
                    reports[verify] = await managers[verify].update_weights(2 * version + turn)
                if version >= WARM_UP:
                    samples.append(_sample(reports, nbytes, (before, raw.gbytes_per_s())))
        grown_nbytes = max([await rank.private_nbytes() for rank in ranks]) - own_nbytes
    finally:
        await managers[True].close()
    return {
        "raw": contender.raw_name,
        "samples": samples,
        "summary": _medians(samples),
        "extra_copies_of_own_shards": grown_nbytes / (nbytes / job.trainers),
    }


def _sample(reports: Mapping[bool, SyncReport], nbytes: int, raw: Sequence[float]) -> dict[str, float]:
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
        "verify_s": seconds["verify"],
        "verification_s": verification_s,
        "verify_of_transfer": verification_s / transfer_s,
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
    """Memory at the peak of any part: the ranks' weights and packed copies, two slots per node, and the raw pair."""
    nbytes = sum(spec.nbytes for spec in job.specs)
    itemsize = getattr(torch, job.source_dtype).itemsize / getattr(torch, job.specs[0].dtype).itemsize
    return int(nbytes * (itemsize + 3 + 2 * job.nodes))
