"""What the examples for Slurm and Kubernetes start, and that what ends is put into the queue again."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.checkpoint_engine.fakes import soon
from tests.trainer.config.launches import Launch, check
from verl.trainer.config.loader import load_config
from verl.utils.device import any_device

ROOT = Path(__file__).parents[1]
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
RAYJOB = ROOT / "examples" / "kubernetes" / "rayjob.yaml"


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A log of what was called, and an environment in which that is called."""
    log, tools = tmp_path / "log", tmp_path / "tools"
    tools.mkdir()
    scripts = {
        # What follows the options of srun is what runs there.
        "srun": "while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && host=${1#*=}; shift; done\n"
        'printf "%s: %s\\n" "$host" "$*" >> "$LOG"\n'
        "[[ $1 == ray ]] && exit 0\n"
        "[[ -n ${HANG:-} ]] && exec sleep 60\n"
        "exit 0\n",
        "scontrol": 'printf "scontrol %s\\n" "$*" >> "$LOG"\n[[ $1 == show ]] && printf "n1\\nn2\\nn3\\n"\nexit 0\n',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}")
        (tools / name).chmod(0o755)
    log.touch()
    return log, os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_GPUS_ON_NODE": "8",
        "DIRECTORY": str(tmp_path / "run"),
    }


def overrides_of(command: str) -> list[str]:
    python, dash_m, module, *overrides = shlex.split(command)
    assert (python, dash_m, module) == ("python", "-m", "verl.trainer.main_ppo")
    return overrides


def test_slurm_starts_ray_on_all_nodes_and_the_driver_beside_the_head(cluster: tuple[Path, dict[str, str]]):
    log, environment = cluster
    subprocess.run(["bash", SBATCH, "trainer.seed=7"], env=environment, check=True, timeout=300)
    rays = {"n1: ray start --head --port=6379 --block"}
    rays |= {f"{name}: ray start --address=n1:6379 --block" for name in ("n2", "n3")}
    assert soon(lambda: rays <= set(log.read_text().splitlines()))  # in the background, as the driver is not
    lines = log.read_text().splitlines()
    (driver,) = [line.removeprefix("n1: ") for line in lines if line.startswith("n1: python")]
    with any_device():
        config = load_config(overrides_of(driver))
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.seed) == (3, 8, 7)
    assert config.trainer.resume_mode == "auto"
    assert "scontrol requeue 17" not in lines


@pytest.mark.job  # it plans a run
@pytest.mark.cells(3)
def test_what_slurm_starts_passes_its_check(cluster: tuple[Path, dict[str, str]]):
    log, environment = cluster
    subprocess.run(["bash", SBATCH], env=environment, check=True, timeout=300)
    (driver,) = re.findall(r"^n1: (python .*)$", log.read_text(), re.MULTILINE)
    with any_device():
        code, said, errors = check(Launch("on three nodes", "hybrid", " ".join(overrides_of(driver))))
    assert (code, errors) == (0, [])
    assert "trainer: 24 ranks (3 x 8)" in said


def test_slurm_puts_a_job_whose_time_is_up_into_the_queue_again(cluster: tuple[Path, dict[str, str]]):
    log, environment = cluster
    job = subprocess.Popen(["bash", SBATCH], env=environment | {"HANG": "1"}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while "main_ppo" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=300)
    assert job.returncode == 0
    assert "goes into the queue again" in said
    assert "scontrol requeue 17" in log.read_text()


def test_the_run_of_the_rayjob_has_a_valid_configuration():
    job = yaml.safe_load(RAYJOB.read_text())
    with any_device():
        config = load_config(overrides_of(job["spec"]["entrypoint"]))
    cluster = job["spec"]["rayClusterSpec"]
    pods = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert (config.trainer.nnodes, config.trainer.resume_mode) == (pods, "auto")
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(config.trainer.n_gpus_per_node)
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/dev/shm" in mounts
    assert any(config.trainer.default_local_dir.startswith(f"{mount}/") for mount in mounts)
