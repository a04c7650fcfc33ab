"""What is wrong with a host is said in one line, with what to do; what is well in one line, too."""

from __future__ import annotations

import json
import resource
from importlib import metadata
from pathlib import Path

import pytest
import torch

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.doctor import command, host
from verl.doctor.finding import Finding, worst
from verl.doctor.host import host_findings

CONFIG = CheckpointEngineConfig.from_mapping({})


def finding(check: str, config: CheckpointEngineConfig = CONFIG) -> Finding:
    (found,) = [finding for finding in host_findings(config) if finding.check == check]
    return found


def test_this_host_can_run_a_job():
    findings = host_findings(CONFIG)
    assert [found for found in findings if found.state == "wrong"] == []
    assert {"python", "packages", "shared memory", "open files", "ports", "backend"} <= {
        found.check for found in findings
    }


def test_another_version_of_a_package_is_wrong(monkeypatch: pytest.MonkeyPatch):
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == "msgspec" else version(name))
    found = finding("packages")
    assert found.state == "wrong"
    assert "msgspec is 0.0.1, not >=" in found.found
    assert "pip install" in found.remedy


def test_shared_memory_that_is_not_there_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("VERL_SHM_DIR", str(tmp_path / "nowhere"))
    found = finding("shared memory")
    assert (found.state, "cannot be written" in found.found) == ("wrong", True)
    assert "VERL_SHM_DIR" in found.remedy


def test_few_open_files_are_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    found = finding("open files")
    assert (found.state, "1024" in found.found, "ulimit -n" in found.remedy) == ("wrong", True, True)


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("NCCL_SOCKET_IFNAME", "ib7", "wrong"),
        ("NCCL_SOCKET_IFNAME", "ib7,l", "ok"),
        ("NCCL_SOCKET_IFNAME", "^ib7", "ok"),
        ("NCCL_SOCKET_IFNAME", "=lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "=l", "wrong"),
        ("GLOO_SOCKET_IFNAME", "lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "l", "wrong"),
        ("GLOO_SOCKET_IFNAME", "lo,ib7", "wrong"),
    ],
)
def test_an_interface_that_nobody_has_is_wrong(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, state: str):
    monkeypatch.setenv(variable, value)
    found = finding("network")
    assert (found.state, f"{variable}={value}" in found.found) == (state, True)


@pytest.mark.parametrize("filters", [True, False])
def test_whether_the_kernel_keeps_others_away_is_told(monkeypatch: pytest.MonkeyPatch, filters: bool):
    monkeypatch.setattr(host, "can_filter", lambda: filters)
    found = finding("sockets")
    assert (found.state, "CAP_NET_ADMIN" in found.found) == ("ok", not filters)


def test_a_backend_whose_interface_is_missing_is_wrong():
    config = CheckpointEngineConfig.from_mapping({"backend": "tcp", "engine_kwargs": {"tcp": {"interface": "ib7"}}})
    found = finding("backend", config)
    assert (found.state, "ib7" in found.found) == ("wrong", True)


def test_rdma_devices_want_memory_that_can_be_locked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "list_ib_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(host, "get_rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    found = finding("rdma")
    assert (found.state, found.remedy) == ("wrong", "ulimit -l unlimited: RDMA pins what it reads")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
@pytest.mark.parametrize("words", [["trainer.device=cuda"], ["trainer.device=npu", "trainer.n_gpus_per_node=4"]])
def test_a_device_that_the_job_asks_for_and_the_host_lacks_is_wrong(words, capsys: pytest.CaptureFixture[str]):
    assert command.main([*words, "--json"]) == 1
    by_check = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert by_check["devices"]["state"] == "wrong"
    assert f"{words[0]}: device" in by_check["devices"]["found"]


def test_fewer_devices_than_the_job_has_ranks_are_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "resolve_device", lambda _: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (found,) = [one for one in host_findings(CONFIG, host.Asked(ranks=4)) if one.check == "devices"]
    assert (found.state, found.found) == ("wrong", "1 cuda devices, and trainer.n_gpus_per_node=4")


def test_the_worst_finding_counts():
    def one(state):
        return Finding(check="x", where="here", state=state, found="")

    assert worst([one("ok"), one("slow"), one("ok")]) == "slow"
    assert worst([one("wrong"), one("slow")]) == "wrong"
    assert worst([]) == "ok"


@pytest.mark.parametrize(("shm", "code"), [(None, 0), ("nowhere", 1)])
def test_the_command_measures_syncs_and_ends_with_a_code(
    shm: str | None, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if shm:
        monkeypatch.setenv("VERL_SHM_DIR", str(tmp_path / shm))
    assert command.main(["checkpoint_engine.backend=tcp", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    by_check = {finding["check"]: finding for finding in said["findings"]}
    assert said["state"] == ("wrong" if shm else by_check["memcpy"]["state"]) or said["state"] == "slow"
    assert by_check["miniature sync"]["state"] == ("wrong" if shm else "ok")
    assert by_check["memcpy"]["value"] > 0
    assert by_check["digest"]["value"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl can be used here")
@pytest.mark.parametrize(("backend", "lacks"), [("nccl", "a CUDA device"), ("hccl", "the package 'torch_npu'")])
def test_a_backend_without_its_device_is_wrong_and_no_sync_is_tried(
    backend: str, lacks: str, capsys: pytest.CaptureFixture[str]
):
    assert command.main([f"checkpoint_engine.backend={backend}", "--json"]) == 1
    by_check = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert by_check["backend"]["state"] == "wrong"
    assert f"checkpoint_engine.backend={backend} needs {lacks}" in by_check["backend"]["found"]
    assert "miniature sync" not in by_check


def test_lines_have_remedies_and_a_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    assert command.main([]) == 1
    said = capsys.readouterr().out
    assert "wrong network" in said
    assert "-> set NCCL_SOCKET_IFNAME to one of them" in said
    assert "1 wrong" in said.splitlines()[-1]


def test_a_key_that_is_none_is_an_error_before_anything_is_measured(capsys: pytest.CaptureFixture[str]):
    assert command.main(["checkpoint_engine.bakend=tcp"]) == 2
    assert "bakend" in capsys.readouterr().err
