"""What UCX is asked before a run begins, and what a user is told when it cannot do that."""

from __future__ import annotations

import logging
import subprocess
from importlib.util import find_spec
from typing import Any

import pytest

from tests.pci_tree import make_tree
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.links.ucx import near_devices
from verl.checkpoint_engine.plan.topology import direct
from verl.checkpoint_engine.plan.types import Member
from verl.checkpoint_engine.registry import resolve_backend

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def check(**options: Any) -> None:
    config = CheckpointEngineConfig(backend="nixl", engine_kwargs={"nixl": options})
    resolve_backend(config).check_host(config)


def test_what_ucx_chooses_itself_is_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("UCX was started"))
    check()
    check(num_workers=2)


@pytest.mark.parametrize("options", [{"ucx_tls": "tcp", "ucx_net_devices": "lo"}, {"ucx_tls": "sm,self"}])
def test_what_is_there_is_accepted(options: dict[str, Any]):
    check(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ucx_tls": "rc_x"}, r"UCX_TLS=rc_x.*'rc_x' is not available, please use one or more of: .*tcp"),
        ({"ucx_net_devices": "nic9:1"}, r"UCX_NET_DEVICES=nic9:1.*'nic9:1' is not available, .*'lo'\(tcp\)"),
        ({"ucx_net_devices": "lo,nic9:1", "ucx_tls": "tcp"}, r"UCX_TLS=tcp, .*'nic9:1' is not available"),
        ({"ucx_tls": "sm,self", "error_handling": "peer"}, "error_handling=peer: .*no peer failure handler"),
    ],
)
def test_what_is_not_there_is_told_with_what_there_is(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        check(**options)


def test_the_environment_wins_and_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "nic8:1")
    with pytest.raises(ConfigError, match="UCX_NET_DEVICES=nic8:1"):
        check(ucx_net_devices="lo")


def test_shared_memory_of_the_environment_needs_no_further_option(monkeypatch: pytest.MonkeyPatch):
    """Its transports cannot promise to notice that a peer has died, so that is not asked of them."""
    monkeypatch.setenv("UCX_TLS", "sm,self")
    check()


def test_reads_over_the_network_are_not_taken_for_copies(monkeypatch: pytest.MonkeyPatch):
    config = CheckpointEngineConfig(backend="nixl")
    node = Member(role="node", index=0, host="here")
    topology = direct([Member(role="trainer", index=0, host="here")], [node])
    engine: Any = resolve_backend(config)(member=node, config=config)
    for tls, copies in (("tcp", False), ("sm,self", True)):
        monkeypatch.setenv("UCX_TLS", tls)
        wire = engine.open_wire(topology)
        assert wire.copies == copies
        wire.close()


def test_a_host_without_a_working_ucx_says_what_happened(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.checkpoint_engine.links.ucx._PROBE", "import sys; sys.exit('no such plugin')")
    with pytest.raises(ConfigError, match="it does not start: no such plugin"):
        check(ucx_tls="tcp")


def test_a_rank_leaves_rdma_devices_to_the_gpus_that_they_are_near_to(tmp_path, caplog):
    gpus, present = make_tree(tmp_path)
    chosen = "^mlx5_0:1,mlx5_1:1,mlx5_2:1"
    with caplog.at_level(logging.INFO, "verl.checkpoint_engine"):
        assert near_devices("trainer-0", gpus / "0000:1b:00.0", 4, present) == chosen
    assert caplog.messages == [
        f"trainer-0 is read over the RDMA devices near its GPU 0000:1b:00.0: UCX_NET_DEVICES={chosen}"
    ]
    assert near_devices("trainer-0", None, 4, present) is None


def test_devices_that_the_environment_names_are_not_chosen_again(tmp_path, caplog, monkeypatch):
    gpus, present = make_tree(tmp_path)
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    with caplog.at_level(logging.INFO, "verl.checkpoint_engine"):
        assert near_devices("trainer-0", gpus / "0000:1b:00.0", 4, present) is None
    assert not caplog.records


def test_ucx_uses_what_is_not_excluded():
    """Its address lists the devices by which it is reached."""

    def address_nbytes(devices: str | None) -> int:
        config = CheckpointEngineConfig(backend="nixl", engine_kwargs={"nixl": {"ucx_net_devices": devices}})
        member = Member(role="trainer", index=0, host="here")
        wire = resolve_backend(config)(member=member, config=config).open_wire(None)
        try:
            return len(wire.address())
        finally:
            wire.close()

    assert address_nbytes("^lo") < address_nbytes(None) == address_nbytes("^mlx5_9:1")
