"""What `--check` sees of the host: places to write, a port, shared memory, network interfaces."""

import os
import re
import socket
import subprocess

import pytest

from tests.strangers import needs_root
from verl.trainer.config.checking import on_its_device
from verl.trainer.config.loader import load_config
from verl.trainer.main_ppo import check_ppo
from verl.trainer.ppo import surroundings
from verl.trainer.ppo.known_good import known_good
from verl.trainer.ppo.requirements import require_of_this_host, require_writable
from verl.trainer.ppo.surroundings import taken_ports, unwritable
from verl.utils.config import ConfigError


@pytest.mark.parametrize("directory", ["new/deep", "file/below", "/proc/x", "file"])
def test_a_directory_is_called_unwritable_if_making_it_fails_and_is_not_made(tmp_path, directory):
    (tmp_path / "file").touch()
    path = tmp_path / directory
    config = load_config([f"trainer.default_local_dir={path}"])
    told = list(unwritable(config))
    assert (known_good(config) is None) or not told
    assert path.exists() == (directory == "file")
    try:
        require_writable("trainer.default_local_dir", str(path))
    except ConfigError as exc:
        assert [line.partition(": ")[0] for line in told] == [str(exc).partition(": ")[0]]
    else:
        assert told == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_called_unwritable(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert list(unwritable(load_config([f"trainer.default_local_dir={tmp_path / 'closed' / 'x'}"])))


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load_config([f"trainer.metrics_port={port}"])
        assert [line.partition(" now: ")[0] for line in taken_ports(config)] == [
            f"trainer.metrics_port={port} cannot be served at 127.0.0.1"
        ]
    assert list(taken_ports(config)) == []


@needs_root
@pytest.mark.parametrize("filters", [True, False])
def test_other_people_on_the_host_are_told_where_the_kernel_does_not_keep_them_away(filters, monkeypatch):
    monkeypatch.setattr(surroundings, "can_filter", lambda: filters)
    with subprocess.Popen(["sleep", "60"], user=1234) as other:
        said = list(surroundings.unfiltered_users())
        other.kill()
    assert said == [] if filters else "1234" in "".join(said)


@pytest.fixture
def no_shared_memory(monkeypatch):
    """The kernel's own file systems have no free memory."""
    monkeypatch.setenv("VERL_SHM_DIR", "/proc")


def checked(engine="vllm"):
    """What `--check` finds: with vLLM without torch, with another engine as it looks at every launch."""
    config = on_its_device(load_config(["trainer.device=cpu", f"actor_rollout_ref.rollout.name={engine}"]))
    found = known_good(config)
    assert found is None or engine == "vllm"
    return found or check_ppo(config)


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_shared_memory_is_told_as_what_the_run_needs_against_what_is_free(engine):
    (line,) = (line for line in checked(engine).plan if "shared memory" in line)
    assert re.fullmatch(r"shared memory: 3\.9 MiB for the weights; [\d.]+ [GM]iB free in /dev/shm", line)


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_too_little_shared_memory_is_what_this_host_lacks(engine, no_shared_memory):
    found = checked(engine)
    assert found.problems == []
    (line,) = found.lacking
    assert "the node arena needs 4078080 bytes (3.9 MiB) of shared memory in /proc" in line


def test_an_interface_of_the_environment_that_is_not_there_is_told_and_ends_a_run_before_it_starts(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    (line,) = checked().lacking
    assert line.startswith("GLOO_SOCKET_IFNAME=ib7 names no interface of ")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=ib7 names no interface of"):
        require_of_this_host(load_config(["trainer.device=cpu"]), 1)


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_hosts_of_a_cluster_are_not_looked_at_and_it_says_so(engine, no_shared_memory, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    found = checked(engine)
    assert [line for line in found.plan if "shared memory" in line] == [
        "shared memory: 3.9 MiB of /proc for the weights on each host with rollouts"
    ]
    assert [line.partition(":")[0] for line in found.lacking] == ["the hosts of RAY_ADDRESS=10.0.0.1"]
