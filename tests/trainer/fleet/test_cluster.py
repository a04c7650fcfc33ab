"""What a cluster says of engines that start beside its trainer ranks."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from verl.trainer.fleet.cluster import Cluster
from verl.workers.rollout.errors import RolloutError


class Failed:
    """A replica after its start failed."""

    @property
    def server_handle(self):
        raise RolloutError("replica-1 has not been started")


@pytest.fixture
def launching():
    return Future()


@pytest.fixture
def cluster(launching):
    made = Cluster.__new__(Cluster)
    made.manager, made._launching = None, launching
    made._pool = SimpleNamespace(replicas=[SimpleNamespace(server_handle="server"), Failed()])
    return made


def test_who_asks_for_the_server_of_an_engine_that_failed_is_told_why(cluster, launching):
    launching.set_exception(RolloutError("vLLM did not start: no such option"))
    with pytest.raises(RolloutError, match="no such option"):
        _ = cluster.server_handles


def test_a_server_that_was_never_begun_is_named(cluster):
    cluster._launching = None
    with pytest.raises(RolloutError, match="replica-1 has not been started"):
        _ = cluster.server_handles
