"""A whole run on three hosts that share nothing but a network and, because they are namespaces, the file system."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Host, NotPermitted, joined_hosts
from tests.checkpoint_engine.backends import using
from tests.checkpoint_engine.fakes import soon
from tests.e2e.job import QUICK
from verl import envs
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PORT = 6379
RAY_S = 60.0
RUN_S = 240.0
STEPS = 2


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
            log = directory / f"node-{number}.log"
            with log.open("w") as output:
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
            assert soon(lambda log=log: "Ray runtime started" in log.read_text(), RAY_S), log.read_text()
        yield f"{hosts[0].address}:{PORT}"


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.mark.parametrize("backend", [using("mooncake")])
def test_a_run_across_hosts_reaches_every_engine_along_a_chain(backend: str, tiny_model: Path, tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    overrides = [
        *QUICK,
        f"actor_rollout_ref.model.path={tiny_model}",
        "trainer.placement=separate",
        "trainer.n_gpus_per_node=2",
        "trainer.num_cpus_per_rank=0.5",
        "actor_rollout_ref.rollout.nnodes=2",
        f"checkpoint_engine.backend={backend}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={tmp_path}",
    ]
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(joined_hosts(3))
        except NotPermitted as exc:
            pytest.skip(str(exc))
        address = stack.enter_context(ray_on(hosts, environment))
        before = [host.received_nbytes for host in hosts]
        run = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, f"ray_kwargs.ray_init.address={address}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=hosts[0].enter,
        )
        try:
            output, _ = run.communicate(timeout=RUN_S)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGKILL)
                run.wait()
        received = [host.received_nbytes - start for host, start in zip(hosts, before, strict=True)]
    assert run.returncode == 0, output
    assert "checkpoint_engine.topology=chain" in output
    reports = [json.loads(line) for line in (tmp_path / "sync_reports.jsonl").read_text().splitlines()]
    assert [report["outcome"] for report in reports] == ["committed"] * (STEPS + 1)
    assert reports[-1]["replicas_updated"] == ["replica-0", "replica-1"]
    assert list(read_metrics(tmp_path / "metrics.jsonl"))[-1]["training/rollout_probs_diff_max"] < 1e-3
    # Ray chose the host of the trainer ranks. Each of the other two has a rollout node, which needs half of the bytes.
    assert sorted(received)[1] > sum(report["nbytes_needed"] for report in reports) / 2
    assert soon(lambda: not list(envs.shm_dir().glob(f"verl-{run.pid}-*")))
