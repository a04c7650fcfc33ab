"""A run seen from outside: scraped while it goes on, then as a page and as a trace."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.test_report import data_of
from tests.cli.test_trace import require_format, tracks_of
from verl.cli.main import cli

pytestmark = pytest.mark.e2e
ENDPOINT = re.compile(r"metrics for Prometheus: (http://127\.0\.0\.1:\d+/metrics)")


@pytest.fixture
def job(start, warm, tmp_path: Path):
    return start(
        "trainer.total_training_steps=200",
        "checkpoint_engine.backend=tcp",
        "trainer.metrics_port=0",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        warm=warm,
    )


def test_a_run_is_scraped_while_it_goes_on_and_shown_when_it_was_ended(job, tmp_path: Path):
    scraped: list[str] = []

    def has_trained() -> bool:
        found = ENDPOINT.search(job.stderr)
        if found is None:
            return False
        with urllib.request.urlopen(found[1], timeout=60) as answer:
            scraped.append(answer.read().decode())
        step = re.search(r"^verl_step (\S+)", scraped[-1], re.MULTILINE)
        return step is not None and float(step[1]) >= 3

    job.wait_for(has_trained, "the third step")
    assert float(re.search(r"verl_sync_seconds_count (\S+)", scraped[-1])[1]) >= 3
    for role, phase in (("trainer", "update_actor"), ("trainer", "publish"), ("node", "stage"), ("driver", "")):
        use = re.search(rf'verl_memory_bytes{{kind="host_peak",phase="{phase}",role="{role}"}} (\S+)', scraped[-1])
        assert use, scraped[-1]
        assert float(use[1]) > 50e6
    assert 'role="engine"' in scraped[-1]
    os.kill(job.driver.pid, signal.SIGTERM)
    job.wait()

    shown = CliRunner().invoke(cli, ["report", str(job.output_dir), "--samples", str(tmp_path / "samples")])
    assert shown.exit_code == 0, shown.output
    data = data_of(job.output_dir / "report.html")
    assert {"trainer", "sync", "replica-0", "trainer-0", "node-0"} <= {track["name"] for track in data["tracks"]}
    assert {chart["role"] for chart in data["memory"]} == {"driver", "engine", "node", "trainer"}
    assert data["samples"][-1]["pieces"][0]["version"] >= 0
    assert all(sum(sync["phase_s"].values()) == pytest.approx(sync["total_s"]) for sync in data["syncs"])

    traced = CliRunner().invoke(cli, ["trace", str(job.output_dir)])
    assert traced.exit_code == 0, traced.output
    events = json.loads((job.output_dir / "trace.json").read_text())["traceEvents"]
    require_format(events)
    assert {event["name"] for event in tracks_of(events)["node-0"]} >= {"stage", "verify", "commit"}
