"""Whole runs on hosts that share nothing but a network and, because they are namespaces, the file system."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.namespaces import Host, NotPermitted, joined_hosts
from tests.checkpoint_engine.fakes import soon
from tests.e2e.job import QUICK
from verl.checkpoint_engine.support import envs
from verl.utils.tracking import read_metrics

PORT = 6379
RAY_S = 240.0
STARTS = 5
"""So often a node may need longer than the 30 s that Ray gives it: other nodes, and other tests, start as well."""
RUN_S = 600.0
MISSED_SOON = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 5000, "failure_threshold": 3}
"""Of Ray's health checks, which take a minute otherwise."""
Title = str | tuple[str, ...]
"""How that of a process begins, or how it may."""
NOTICES_SOON = {f"RAY_health_check_{name}": str(value) for name, value in MISSED_SOON.items()}


@contextlib.contextmanager
def ray_on(hosts: tuple[Host, ...], cpus: Sequence[int], environment: dict[str, str]) -> Iterator[str]:
    """A Ray cluster with a node on each of `hosts`; its address. It asks for a token, as Ray does by itself."""
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="vsr-"))  # sockets are in it, whose paths must be short
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for number, (host, of_host) in enumerate(zip(hosts, cpus, strict=True)):
            role = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={directory}"]
            if number:
                role = [f"--address={hosts[0].address}:{PORT}"]
            role.append(f"--num-cpus={of_host}")
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
            + [f"--node-ip-address={host.address}", f"--object-store-memory={2**27}"],
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
    """`main_ppo` on several hosts, its driver on the first of them."""

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
        path = self.output_dir / "metrics.jsonl"
        return list(read_metrics(path)) if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        """Until it is recorded."""

        def is_recorded() -> bool:
            assert self.driver.poll() is None, self.said.read_text()
            return any(record["step"] >= step for record in self.metrics)

        assert soon(is_recorded, RUN_S), self.said.read_text()

    def hosts_with(self, process: Title) -> list[Host]:
        """Those on which a Ray process of that name lives."""
        return [host for host in self.hosts if self.processes(process, host)]

    def processes(self, name: Title, host: Host) -> list[int]:
        """Process ids of Ray processes of that name on `host`."""
        place, found = os.stat(f"/run/netns/{host.namespace}").st_ino, []
        for one in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                title = (one.info["cmdline"] or [""])[0]
                if title.startswith(name) and os.stat(f"/proc/{one.pid}/ns/net").st_ino == place:
                    found.append(one.pid)
        return found

    def kill(self, host: Host, *names: Title) -> None:
        """Of each of these names what lives on `host`, at once."""
        found = {name: self.processes(name, host) for name in names}
        assert all(found.values()), found
        for pid in (pid for pids in found.values() for pid in pids):
            os.kill(pid, signal.SIGKILL)


@dataclass
class HostsWithRay:
    """A Ray cluster with a node on each host."""

    hosts: tuple[Host, ...]
    address: str
    environment: dict[str, str]
    drivers: list[int] = field(default_factory=list)
    """Process ids of those of all runs."""

    @contextlib.contextmanager
    def running(self, model: Path, output_dir: Path, *overrides: str) -> Iterator[Run]:
        """A run with its rollouts on hosts without trainer ranks."""
        settings = [
            *QUICK,
            f"actor_rollout_ref.model.path={model}",
            "trainer.placement=separate",
            "trainer.num_cpus_per_rank=0.5",
            f"trainer.default_local_dir={output_dir}",
            f"ray_kwargs.ray_init.address={self.address}",
            *overrides,
        ]
        with contextlib.ExitStack() as stack:
            said = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="verl-run-", suffix=".log"))
            driver = subprocess.Popen(
                [sys.executable, "-m", "verl.trainer.main_ppo", *settings],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=self.hosts[0].enter,
            )
            self.drivers.append(driver.pid)
            stack.callback(end, driver)
            yield Run(self.hosts, driver, Path(said.name), output_dir)


@contextlib.contextmanager
def hosts_with_ray(
    number: int, *, ray: Mapping[str, str] | None = None, cpus: Sequence[int] = ()
) -> Iterator[HostsWithRay]:
    """`ray`: of its environment; `cpus`: how many it has on each host, 2 by default. Nothing of the runs is left in
    memory afterwards."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(joined_hosts(number))
        except NotPermitted as exc:
            pytest.skip(str(exc))
        address = stack.enter_context(ray_on(hosts, cpus or (2,) * number, environment | dict(ray or {})))
        cluster = HostsWithRay(hosts, address, environment)
        yield cluster
    for pid in cluster.drivers:  # of a host that was cut off once its part of Ray has ended
        assert soon(lambda pid=pid: not list(envs.shm_dir().glob(f"verl-{pid}-*")))
