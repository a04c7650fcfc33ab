"""Serves the driver's metrics to Prometheus: `trainer.metrics_port`. Its own registry excludes vLLM's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from verl.checkpoint_engine.plan.types import PHASES, SyncReport
from verl.utils.config import ConfigError

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
"""Bounds of the buckets, from a tiny model on one host to a large one across many."""
GAUGES = {
    "critic/score/mean": ("verl_reward", "mean score of the last step"),
    "training/global_step": ("verl_step", "training steps done"),
    "training/staleness/mean": ("verl_staleness_mean", "versions between a token's weights and the trainer's"),
    "training/staleness/max": ("verl_staleness_max", "the largest of the step"),
    "rollout/replicas": ("verl_rollout_replicas", "rollout replicas in service"),
    "rollout/restarts": ("verl_rollout_restarts", "rollout engines restarted since the run began"),
    "fully_async/count/queue_size": ("verl_queue_samples", "samples that wait for the trainer"),
    "perf/throughput": ("verl_tokens_per_second", "tokens per second and trainer rank"),
    "perf/time_per_step": ("verl_step_seconds", "seconds of the last step"),
}
"""By metric of a step: its name in Prometheus, and its meaning."""


class MetricsServer:
    """Serves `/metrics` from its own thread. A context manager: leaving it frees the port.

    Raises ConfigError at construction for a port that cannot be bound.
    """

    def __init__(self, port: int, host: str) -> None:
        """With `port` 0, binds any free port; the attribute `port` has its number."""
        registry = CollectorRegistry()
        self._phases = Histogram(
            "verl_sync_phase_seconds", "seconds of the phases of a sync", ["phase"], registry=registry, buckets=SECONDS
        )
        self._total = Histogram("verl_sync_seconds", "seconds of a whole sync", registry=registry, buckets=SECONDS)
        self._syncs = Counter("verl_syncs", "syncs by outcome", ["outcome"], registry=registry)
        self._counters = {
            name: Counter(f"verl_sync_{name}", what, registry=registry)
            for name, what in (
                ("moved_bytes", "bytes that syncs copied"),
                ("retries", "attempts after the first"),
                ("quarantined", "replicas that left service during a sync"),
                ("repaired_pieces", "pieces that arrived wrong and were read again"),
            )
        }
        self._last = {
            name: Gauge(f"verl_sync_{name}", what, registry=registry)
            for name, what in (
                ("version", "the version that was committed last"),
                (
                    "gigabytes_per_second",
                    "bytes needed over the seconds of publish, stage and verify, of the last sync",
                ),
                ("trainer_blocked_seconds", "how long the last sync kept the trainer from its weights"),
                ("paused_seconds", "the longest pause of a replica in the last sync"),
                ("slowest_wait_seconds", "how much longer the slowest members of the last sync took than the median"),
            )
        }
        self._gauges = {metric: Gauge(name, what, registry=registry) for metric, (name, what) in GAUGES.items()}
        self._memory = Gauge(
            "verl_memory_bytes", "of the largest process of a role", ["role", "phase", "kind"], registry=registry
        )
        self._steps = Gauge("verl_metric", "every metric of the last step", ["name"], registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as exc:
            raise ConfigError(f"trainer.metrics_port={port} cannot be served at {host}: {exc}") from exc
        self.port: int = self._server.server_port

    def synced(self, report: SyncReport) -> None:
        """Record a sync that has ended, successful or not."""
        self._syncs.labels(report.outcome).inc()
        for name, value in (
            ("moved_bytes", report.nbytes_moved),
            ("retries", report.retries),
            ("quarantined", len(report.replicas_quarantined)),
            ("repaired_pieces", report.pieces_repaired),
        ):
            self._counters[name].inc(value)
        if report.outcome != "committed":
            return
        self._total.observe(report.total_s)
        for phase in PHASES:
            self._phases.labels(phase).observe(report.phase_s.get(phase, 0.0))
        scalars = report.metrics()
        for name, key in (
            ("version", "version"),
            ("gigabytes_per_second", "gbytes_per_s"),
            ("trainer_blocked_seconds", "trainer_blocked_s"),
            ("paused_seconds", "generation_paused_s"),
            ("slowest_wait_seconds", "slowest_wait_s"),
        ):
            self._last[name].set(scalars[f"checkpoint_engine/{key}"])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Set the gauges from a step's metrics. Implements `Tracker`."""
        for name, value in metrics.items():
            self._steps.labels(name).set(value)
            if name in self._gauges:
                self._gauges[name].set(value)
            if name.startswith("memory/") and name.endswith("_gb"):
                role, phase, kind = _of_memory(name)
                self._memory.labels(role, phase, kind).set(value * 1e9)

    def close(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _of_memory(name: str) -> tuple[str, str, str]:
    """`memory/node/stage/host_peak_gb` is role `node`, phase `stage`, kind `host_peak`; without a phase it is empty."""
    _, role, *phase, kind = name.split("/")
    return role, "/".join(phase), kind.removesuffix("_gb")
