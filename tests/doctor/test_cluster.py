"""Every host of a cluster is looked at, clocks are compared, ways between hosts measured, and members sync."""

from __future__ import annotations

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.doctor import cluster
from verl.doctor.cluster import Prober, cluster_findings, hosts_of_cluster
from verl.doctor.miniature_ranks import miniature_over

CONFIG = CheckpointEngineConfig.from_mapping({"backend": "tcp"})


class Called:
    """An actor's method, called here."""

    def __init__(self, method):
        self.remote = method


class Here:
    def __init__(self, prober: Prober):
        self.listen, self.probe = Called(prober.listen), Called(prober.probe)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster.ray, "get", lambda value, **_: value)


def test_the_way_between_two_hosts_is_measured(without_ray):
    probers = {"127.0.0.1": Here(Prober())}
    found = cluster._way("127.0.0.1", "127.0.0.1", probers)
    assert found.state in ("ok", "slow")
    assert found.value is not None
    assert found.value > 0
    assert "Gbit/s" in found.found


def test_a_way_that_is_closed_is_wrong(without_ray, monkeypatch: pytest.MonkeyPatch):
    prober = Here(Prober())
    monkeypatch.setattr(cluster, "PROBE_TIMEOUT_S", 0.2)
    prober.listen = Called(lambda: 1)
    found = cluster._way("127.0.0.1", "127.0.0.1", {"127.0.0.1": prober})
    assert (found.state, "no connection" in found.found) == ("wrong", True)
    assert "ports" in found.remedy


def test_a_slow_way_is_called_slow(without_ray, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "LEAST_GBIT_PER_S", 1e9)
    assert cluster._way("127.0.0.1", "127.0.0.1", {"127.0.0.1": Here(Prober())}).state == "slow"


def test_few_hosts_are_paired_with_all_and_many_with_the_next():
    assert len(cluster._pairs(["a", "b", "c"])) == 6
    many = [str(host) for host in range(100)]
    assert cluster._pairs(many)[-1] == ("99", "0")
    assert len(cluster._pairs(many)) == 100


def test_a_host_that_does_not_answer_is_named_and_the_others_are_looked_at(ray_cluster, monkeypatch):
    gone = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id="e" * 56, soft=False)}
    nowhere = {"resources": {"nowhere": 1}}
    found = cluster_findings(CONFIG, hosts_of_cluster() | {"gone": gone})
    assert {"python", "memcpy", "clock"} <= {finding.check for finding in found}
    assert [(finding.check, finding.where) for finding in found if finding.state == "wrong"] == [("answer", "gone")]
    monkeypatch.setattr(cluster, "ANSWERS_WITHIN_S", 0.1)
    (silent,) = cluster_findings(CONFIG, {"nowhere": nowhere})
    assert (silent.where, silent.found) == ("nowhere", "a process of Ray's there: none within 0.1 s")


def test_a_cluster_is_looked_at_and_its_members_sync(ray_cluster):
    hosts = hosts_of_cluster()
    assert len(hosts) == 1
    found = cluster_findings(CONFIG, hosts)
    assert {"python", "memcpy", "clock"} <= {finding.check for finding in found}
    assert [finding for finding in found if finding.state == "wrong"] == []
    synced = miniature_over(CONFIG, [*hosts.values()] * 2)
    assert (synced.state, "from 2 ranks to 2 nodes" in synced.found) == ("ok", True), synced
    assert ray.is_initialized()
