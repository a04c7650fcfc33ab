"""Workers as forks of a process that has imported what they need."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.processes import wait_until_gone
from verl.trainer.fleet.warm import ray_worker
from verl.trainer.fleet.warm.process import wanted

RAYS_OWN = "import json, sys; print(json.dumps(sys.argv[1:]))"


@pytest.fixture
def scripts(tmp_path):
    """In the place of Ray's: the second is what Ray starts for a worker."""
    (tmp_path / "setup_worker.py").write_text(RAYS_OWN)
    (tmp_path / "default_worker.py").write_text("")
    return tmp_path


def assert_starts_as_ray_does(scripts: Path, **context: object) -> None:
    """What Ray starts for a worker, with this `context`, becomes Ray's own script, which has all arguments."""
    whole = {"command_prefix": [], "env_vars": {}, "py_executable": sys.executable, "override_worker_entrypoint": None}
    arguments = [
        str(scripts / "default_worker.py"),
        "--node-ip-address=192.0.2.1",
        f"--serialized-runtime-env-context={json.dumps(whole | context)}",
        "--language=PYTHON",
    ]
    done = subprocess.run(
        [sys.executable, ray_worker.__file__, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == arguments


def test_without_the_process_that_forks_a_worker_starts_as_ray_starts_it(scripts, tmp_path):
    assert_starts_as_ray_does(scripts)
    gone = tmp_path / "socket"
    assert_starts_as_ray_does(scripts, env_vars={ray_worker.SOCKET: str(gone)})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(gone))
    assert_starts_as_ray_does(scripts, env_vars={ray_worker.SOCKET: str(gone)})  # nobody listens


def test_a_worker_that_waits_for_a_process_that_ends_starts_as_ray_starts_it(scripts, tmp_path):
    asked = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(asked))
        listener.listen()
        code = f"import socket; s = socket.socket(fileno={listener.fileno()}); s.accept()"
        with subprocess.Popen([sys.executable, "-c", code], pass_fds=[listener.fileno()]):
            listener.close()
            assert_starts_as_ray_does(scripts, env_vars={ray_worker.SOCKET: str(asked)})


@pytest.mark.parametrize(
    "context",
    [{"py_executable": "nsys profile python"}, {"command_prefix": ["conda activate &&"]}],
    ids=["profiled", "another environment"],
)
def test_what_ray_prepares_for_a_worker_is_left_to_ray(scripts, tmp_path, context):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        assert_starts_as_ray_does(scripts, env_vars={ray_worker.SOCKET: str(tmp_path / "socket")}, **context)


def config(*, device=None, address=None, runtime_env=None, warm_workers="auto", executor=None):
    arguments = {"address": address} if address else {}
    arguments |= {"runtime_env": runtime_env} if runtime_env is not None else {}
    rollout = SimpleNamespace(engine_kwargs={"vllm": {"distributed_executor_backend": executor} if executor else {}})
    return SimpleNamespace(
        trainer=SimpleNamespace(warm_workers=warm_workers, device=device),
        ray_kwargs=SimpleNamespace(ray_init=arguments),
        actor_rollout_ref=SimpleNamespace(rollout=rollout),
    )


def test_workers_are_forks_in_a_ray_of_the_run_on_a_cpu(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert wanted(config(device="cpu"))
    assert not wanted(config(device="cpu", warm_workers="off"))
    assert not wanted(config(device="cpu", address="192.0.2.1:6379"))
    assert not wanted(config(device="cpu", runtime_env={"env_vars": {"HF_HOME": "/elsewhere"}}))
    assert not wanted(config(device="cpu", executor="ray"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not wanted(config(device="cpu"))


def test_the_process_that_forks_ends_with_the_driver_and_leaves_no_file(tmp_path):
    directory = tmp_path / "warm"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, subprocess.Popen(["sleep", "600"]) as driver:
        listener.bind(str(directory / "socket"))
        listener.listen()
        command = [sys.executable, "-m", "verl.trainer.fleet.warm.server", str(listener.fileno()), str(driver.pid)]
        with subprocess.Popen([*command, "json"], pass_fds=[listener.fileno()]) as server:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            assert server.wait(60) == 0
    assert not directory.exists()


def test_a_fork_takes_limits_as_they_were_told():
    code = "from verl.trainer.fleet.warm import forks, ray_worker; import json, sys; "
    code += "forks.take_limits(json.loads(sys.argv[1])); print(json.dumps(ray_worker.limits()))"
    *numbered, _ = ray_worker.limits()
    files = next(one for one in numbered if one[0] == resource.RLIMIT_NOFILE)
    files[1:] = [256, 512]
    wanted = [*numbered, [1000]]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(wanted)], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == wanted


def test_forks_draw_other_numbers_and_take_the_threads_and_limits_that_ray_gave_them(ray_cluster):
    import ray

    @ray.remote(num_cpus=0)
    class Worker:
        def limits(self) -> list[list[int]]:
            return ray_worker.limits()

        def look(self) -> tuple[float, int, bool, int]:
            import numpy as np
            import torch

            return np.random.rand(), torch.get_num_threads(), torch._dynamo.config.disable, os.getpid()

    variables = [{"OMP_NUM_THREADS": "2", "TORCHDYNAMO_DISABLE": "1"}, {"OMP_NUM_THREADS": "1"}]
    workers = [Worker.options(runtime_env={"env_vars": each}).remote() for each in variables]
    (one, threads, disabled, pid), (other, *rest, _) = ray.get([worker.look.remote() for worker in workers])
    assert one != other
    assert (threads, disabled) == (2, True)
    assert rest == [1, False]
    *numbered, (score,) = ray.get(workers[0].limits.remote())
    assert [resource.RLIMIT_NOFILE, *resource.getrlimit(resource.RLIMIT_NOFILE)] in numbered
    assert score > int(Path("/proc/self/oom_score_adj").read_text())
    process = psutil.Process(pid)
    for worker in workers:
        ray.kill(worker)
    assert wait_until_gone([process]) == []
