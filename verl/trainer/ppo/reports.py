"""Reports of a run's steps: metrics, and a timeline of its processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from math import inf
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.support import records
from verl.checkpoint_engine.support.memory import MemoryUse, memory_watch, most
from verl.protocol import DataProto
from verl.trainer.fleet.cluster import Cluster, sync_report_path
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.step import Metrics, Step
from verl.utils.timing import TIMELINE_FILE, Span, go_back, write_spans
from verl.workers.config import PPOConfig


class Reports:
    """Used on the driver. Reports what rollout engines answered since the last call, so that no step waits for them."""

    def __init__(self, config: PPOConfig, cluster: Cluster) -> None:
        self._cluster = cluster
        self._timeline = Path(config.trainer.output_dir) / TIMELINE_FILE
        self._syncs = sync_report_path(config)
        self._restarts = 0
        """Of trainer ranks, of which metrics have told."""
        self._asked_engines: Future[list[Span]] | None = None
        self._measured_engines: Future[list[MemoryUse]] | None = None

    def forget_undone(self, start: int, again: Collection[str]) -> None:
        """Drop records of an earlier run in this directory, for the steps that this run repeats."""
        go_back(self._timeline, start, again)
        records.carry_over(self._syncs, lambda report: _version(report) < start)

    def metrics(self, batch: DataProto, now: Step, *, epoch: int) -> Metrics:
        """Metrics of a finished step, and of the processes at its end."""
        ranks, metrics = self._cluster.trainer_ranks, compute_data_metrics(batch)
        metrics |= compute_timing_metrics(batch, now.seconds)
        metrics |= compute_throughput_metrics(batch, now.seconds, ranks.group.world_size)
        metrics |= {"training/global_step": now.number, "training/epoch": epoch}
        metrics |= {"training/attempt": ranks.restarts, "training/ranks": ranks.group.world_size}
        if ranks.loss is not None and ranks.restarts > self._restarts:
            self._restarts, metrics = ranks.restarts, metrics | ranks.loss.metrics()
        metrics |= {"rollout/restarts": self._cluster.restarts, "rollout/replicas": len(self._cluster.replicas)}
        return metrics | self._memory_metrics()

    def write_timeline(self, now: Step, *, last: bool = False) -> None:
        """Append spans to the timeline: the trainer's and syncs' of this step, the engines' up to the last call."""
        engines = [] if self._asked_engines is None else self._asked_engines.result()
        starting = self._cluster.starting.spans.take()
        write_spans(self._timeline, [*starting, *now.spans.take(), *now.syncs.take(), *engines])
        self._asked_engines = None if last else self._cluster.begin_take_spans()

    def _memory_metrics(self) -> dict[str, float]:
        """Of the driver, and the largest of the engines, as they were one step before."""
        metrics = memory_watch().since_start("driver").metrics("driver")
        if self._measured_engines is not None and (use := most(self._measured_engines.result())) is not None:
            metrics |= use.metrics("engine")
        self._measured_engines = self._cluster.begin_measure_engines()
        return metrics


def _version(report: Mapping[str, Any]) -> float:
    version = report.get("version")
    return version if isinstance(version, int) else inf
