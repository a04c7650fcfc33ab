"""A whole run on three hosts that share nothing but a network and, because they are namespaces, the file system."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.namespaces import Host, NotPermitted, joined_hosts
from tests.checkpoint_engine.backends import using
from tests.checkpoint_engine.fakes import soon
from tests.e2e.job import QUICK
from verl.checkpoint_engine.support import envs
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.cells(2)]

PORT = 6379
RAY_S = 240.0
STARTS = 5
"""So often a node may need longer than the 30 s that Ray gives it: other nodes, and other tests, start as well."""
RUN_S = 600.0
STEPS = 2
MISSED_SOON = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 5000, "failure_threshold": 3}
"""Of Ray's health checks, which take a minute otherwise."""


@contextlib.contextmanager
def ray_on(hosts: tuple[Host, ...], environment: dict[str, str]) -> Iterator[str]:
    """A Ray cluster with a node on each of `hosts`; its address. It asks for a token, as Ray does by itself."""
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="vsr-"))  # sockets are in it, whose paths must be short
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for number, host in enumerate(hosts):
            role = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={directory}"]
            if number:
                role = [f"--address={hosts[0].address}:{PORT}"]
            started = (start_node(host, role, environment, directory, stack) for _ in range(STARTS))
            assert any(started), "\n".join(log.read_text() for log in directory.glob("*.log"))
        yield f"{hosts[0].address}:{PORT}"


def start_node(
    host: Host, role: list[str], environment: dict[str, str], directory: Path, stack: contextlib.ExitStack
) -> bool:
    """Whether it has started, or else ended."""
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix="node-", suffix=".log", delete=False) as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", *role, "--block"]
            + [f"--node-ip-address={host.address}", "--num-cpus=2", f"--object-store-memory={2**27}"],
            env=environment | {"RAY_AUTH_MODE": "token"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=host.enter,
        )
    stack.callback(end, process)
    log = Path(output.name)
    assert soon(lambda: process.poll() is not None or "Ray runtime started" in log.read_text(), RAY_S), log.read_text()
    return process.poll() is None


def end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Run:
    """`main_ppo` on three hosts, its driver on the first of them; the rollouts on two without trainer ranks."""

    hosts: tuple[Host, ...]
    driver: subprocess.Popen[bytes]
    said: Path
    """A file: a pipe that nobody reads would stop a driver that says much."""
    output_dir: Path

    def output(self) -> str:
        """All that it has said when it has ended, in order."""
        assert soon(lambda: self.driver.poll() is not None, RUN_S), self.said.read_text()
        assert self.driver.returncode == 0, self.said.read_text()
        return self.said.read_text()

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output_dir / "sync_reports.jsonl").read_text().splitlines()]

    @property
    def metrics(self) -> list[dict[str, float]]:
        return list(read_metrics(self.output_dir / "metrics.jsonl"))

    def hosts_with(self, process: str) -> list[Host]:
        """Those on which a Ray process of that name lives."""
        found = [
            one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [""])[0].startswith(process)
        ]
        places = {os.stat(f"/proc/{one.pid}/ns/net").st_ino for one in found}
        return [host for host in self.hosts if os.stat(f"/run/netns/{host.namespace}").st_ino in places]


@contextlib.contextmanager
def running(model: Path, output_dir: Path, *overrides: str, ray: Mapping[str, str] | None = None) -> Iterator[Run]:
    """`ray`: of its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    settings = [
        *QUICK,
        f"actor_rollout_ref.model.path={model}",
        "trainer.placement=separate",
        "trainer.n_gpus_per_node=2",
        "trainer.num_cpus_per_rank=0.5",
        "actor_rollout_ref.rollout.nnodes=2",
        f"trainer.default_local_dir={output_dir}",
        *overrides,
    ]
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(joined_hosts(3))
        except NotPermitted as exc:
            pytest.skip(str(exc))
        address = stack.enter_context(ray_on(hosts, environment | dict(ray or {})))
        said = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="verl-run-", suffix=".log"))
        driver = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *settings, f"ray_kwargs.ray_init.address={address}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            preexec_fn=hosts[0].enter,
        )
        stack.callback(end, driver)
        yield Run(hosts, driver, Path(said.name), output_dir)
    assert soon(lambda: not list(envs.shm_dir().glob(f"verl-{driver.pid}-*")))


@pytest.mark.parametrize("backend", [using("mooncake")])
def test_a_run_across_hosts_reaches_every_engine_along_a_chain(backend: str, tiny_model: Path, tmp_path: Path):
    overrides = f"checkpoint_engine.backend={backend}", f"trainer.total_training_steps={STEPS}"
    with running(tiny_model, tmp_path, *overrides) as run:
        before = [host.received_nbytes for host in run.hosts]
        assert "checkpoint_engine.topology=chain" in run.output()
        received = [host.received_nbytes - start for host, start in zip(run.hosts, before, strict=True)]
    assert [report["outcome"] for report in run.reports] == ["committed"] * (STEPS + 1)
    assert run.reports[-1]["replicas_updated"] == ["replica-0", "replica-1"]
    assert run.metrics[-1]["training/rollout_probs_diff_max"] < 1e-3
    # Ray chose the host of the trainer ranks. Each of the other two has a rollout node, which needs half of the bytes.
    assert sorted(received)[1] > sum(report["nbytes_needed"] for report in run.reports) / 2


def test_a_run_goes_on_when_a_host_with_rollouts_is_cut_off(tiny_model: Path, tmp_path: Path):
    steps = 4
    overrides = (
        "checkpoint_engine.backend=gloo",
        "actor_rollout_ref.actor.ppo_epochs=20",  # a second: the run is not over before the host is cut off
        "checkpoint_engine.deadlines.publish_s=10",
        "checkpoint_engine.deadlines.prepare_s=15",
        f"trainer.total_training_steps={steps}",
    )
    checks = {f"RAY_health_check_{name}": str(value) for name, value in MISSED_SOON.items()}
    with running(tiny_model, tmp_path, *overrides, ray=checks) as run:
        assert soon((tmp_path / "sync_reports.jsonl").exists, RUN_S), run.said.read_text()
        lost = run.hosts_with("ray::CheckpointEngineWorker")[-1]
        assert lost is not run.hosts[0]
        lost.cut_off()
        output = run.output()
    assert f"{lost.address} is lost; the run goes on without node-" in output
    committed = [report for report in run.reports if report["outcome"] == "committed"]
    assert [report["version"] for report in committed] == list(range(steps + 1))
    assert len(committed[0]["replicas_updated"]) == 2
    assert len(committed[-1]["replicas_updated"]) == 1
    assert [len(run.metrics), run.metrics[-1]["rollout/replicas"]] == [steps, 1.0]
    assert run.metrics[-1]["training/rollout_probs_diff_max"] < 1e-3
