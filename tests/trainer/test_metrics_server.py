"""What Prometheus scrapes, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.free_ports import free_port
from tests.cli.runs import PHASE_S, sync_report
from verl.trainer.metrics_server import GAUGES, MetricsServer
from verl.utils.config import ConfigError
from verl.utils.tracking import Tracking

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "verl_sync.json"
STEP = dict.fromkeys(GAUGES, 2.5) | {
    "critic/score/mean": 0.75,
    "memory/node/stage/host_peak_gb": 1.5,
    "memory/driver/host_gb": 0.5,
}


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(0, "127.0.0.1") as server:
        yield server


def scraped(server: MetricsServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(server: MetricsServer, name: str, /, **labels: str) -> float:
    return scraped(server)[name, frozenset(labels.items())]


def test_every_sync_is_in_the_histograms_of_its_phases(server: MetricsServer):
    for version in (1, 2, 3):
        server.synced(sync_report(version, 0.0))
    for phase, seconds in PHASE_S.items():
        assert value(server, "verl_sync_phase_seconds_count", phase=phase) == 3
        assert value(server, "verl_sync_phase_seconds_sum", phase=phase) == pytest.approx(3 * seconds)
    assert value(server, "verl_sync_phase_seconds_bucket", phase="stage", le="1.0") == 3
    assert value(server, "verl_sync_phase_seconds_bucket", phase="stage", le="0.5") == 0
    assert value(server, "verl_sync_seconds_count") == 3
    assert value(server, "verl_sync_moved_bytes_total") == 9e9
    assert value(server, "verl_sync_version") == 3
    assert value(server, "verl_sync_slowest_wait_seconds") == pytest.approx(0.6)


def test_an_aborted_sync_counts_among_failures_alone(server: MetricsServer):
    server.synced(sync_report(1, 0.0))
    server.synced(replace(sync_report(2, 0.0), outcome="aborted", retries=2, replicas_quarantined=("replica-1",)))
    assert value(server, "verl_syncs_total", outcome="committed") == 1
    assert value(server, "verl_syncs_total", outcome="aborted") == 1
    assert value(server, "verl_sync_retries_total") == 2
    assert value(server, "verl_sync_quarantined_total") == 1
    assert value(server, "verl_sync_version") == 1
    assert value(server, "verl_sync_seconds_count") == 1


def test_the_metrics_of_a_step_are_served(server: MetricsServer):
    server.log(STEP, 7)
    assert value(server, "verl_reward") == 0.75
    assert value(server, "verl_queue_samples") == 2.5
    assert value(server, "verl_memory_bytes", role="node", phase="stage", kind="host_peak") == 1.5e9
    assert value(server, "verl_memory_bytes", role="driver", phase="", kind="host") == 0.5e9
    assert value(server, "verl_metric", name="critic/score/mean") == 0.75


def test_it_is_a_destination_of_a_run_s_metrics(server: MetricsServer, tmp_path: Path):
    with Tracking("project", "experiment", ["jsonl"], tmp_path, {}, also=[server]) as tracking:
        tracking.log({"critic/score/mean": 0.5}, 1)
        assert value(server, "verl_reward") == 0.5
    assert (tmp_path / "metrics.jsonl").exists()


def test_the_dashboard_asks_for_what_is_served(server: MetricsServer):
    server.synced(sync_report(1, 0.0))
    server.log(STEP, 1)
    served = {name for name, _ in scraped(server)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"\bverl_\w+", target["expr"])
    }
    assert asked <= served
    assert {name for name, _ in GAUGES.values()} <= asked
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_vllm_s_metrics_and_python_s_are_not_among_ours(server: MetricsServer):
    server.synced(sync_report(1, 0.0))
    assert all(name.startswith("verl_") for name, _ in scraped(server))


def test_a_port_that_is_taken_is_an_error_that_names_the_key(server: MetricsServer):
    with pytest.raises(ConfigError, match=rf"trainer.metrics_port={server.port} cannot be served at 127.0.0.1"):
        MetricsServer(server.port, "127.0.0.1")


def test_a_port_is_free_again_when_the_server_is_closed():
    port = free_port()
    with MetricsServer(port, "127.0.0.1") as first:
        pass
    first.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
    with MetricsServer(port, "127.0.0.1") as second:
        assert value(second, "verl_sync_seconds_count") == 0
