"""A trainer that spans Ray nodes."""

import json
import os
import signal

import pytest

from tests.warm_workers import ENVIRONMENT, Fork

# Ray gives a node 30 s to start, and there are three: alone on the machine.
pytestmark = [pytest.mark.e2e, pytest.mark.alone]


@pytest.fixture(scope="module")
def found(tmp_path_factory, tiny_model, warm):
    """What `several_nodes` has to tell."""
    directory = tmp_path_factory.mktemp("nodes")
    arguments = [str(directory), str(tiny_model), json.dumps(warm.runtime_env)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ENVIRONMENT
    with (directory / "stdout").open("w") as stdout, (directory / "stderr").open("w") as stderr:
        driver = Fork(warm, "tests.e2e.several_nodes", arguments, env=environment, stdout=stdout, stderr=stderr)
    try:
        code = driver.wait(900)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    assert code == 0, (directory / "stderr").read_text()
    return json.loads((directory / "stdout").read_text().splitlines()[-1])


def nodes_of(run):
    """Ray nodes of the trainer ranks, of the rollout nodes and of the engines."""
    return [set(run["nodes"][name]) for name in ("ActorRolloutRefWorker", "CheckpointEngineWorker", "RolloutServer")]


def test_trainer_ranks_are_on_nodes_of_their_own_and_the_rollouts_on_another(found):
    trainers, arenas, servers = nodes_of(found["separate"])
    assert (len(trainers), len(arenas)) == (2, 1)
    assert servers == arenas
    assert not arenas & trainers


def test_a_colocated_trainer_has_an_arena_and_an_engine_on_each_of_its_nodes(found):
    trainers, arenas, servers = nodes_of(found["colocated"])
    assert len(trainers) == 2
    assert trainers == arenas == servers
    assert found["colocated"]["reports"][-1]["replicas_updated"] == ["replica-0", "replica-1"]


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_ranks_on_two_nodes_train_and_reach_the_rollouts(found, placement):
    run = found[placement]
    assert run["step"] == 1
    assert [report["outcome"] for report in run["reports"]] == ["committed", "committed"]
    assert run["metrics"][-1]["training/rollout_probs_diff_max"] < 1e-3


def test_a_rank_whose_host_is_gone_goes_on_elsewhere_with_what_another_host_has_of_its_state(found):
    run = found["moved"]
    assert run["step"] == 3
    assert [(record["training/ranks"], record["training/attempt"]) for record in run["metrics"]] == [
        (2, 0),
        (2, 0),
        (2, 1),
    ]  # nothing was saved: without the copy all steps would have been repeated
    assert run["metrics"][-1]["training/rollout_probs_diff_max"] < 1e-3


def test_without_room_for_all_ranks_fewer_go_on_with_what_all_of_them_left_in_memory(found):
    run = found["fewer"]
    assert run["step"] == 3
    assert [(record["training/ranks"], record["training/attempt"]) for record in run["metrics"]] == [
        (2, 0),
        (2, 0),
        (1, 1),
    ]  # nothing was saved here either
    assert [report["version"] for report in run["reports"] if report["outcome"] == "committed"][-1] == 3
    assert run["metrics"][-1]["training/rollout_probs_diff_max"] < 1e-3


def test_what_ranks_are_given_back_is_always_the_state_of_the_step_that_is_said(found):
    remembered = found["remembered"]
    assert remembered["a host"] == [2, True]
    assert remembered["a host, and fewer go on"] == [3, True]
    assert remembered["these, too"] == [3, True]
    assert remembered["a host, at some moment"] in ([3, True], [4, True])
    assert remembered["forgotten"] == [None, False]
    assert remembered["another state of the same step"] == [1, True]
    assert remembered["left"] == 0


def test_every_rank_saves_its_part(found):
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(found["separate"]["saved"])


def test_a_cluster_with_too_few_nodes_is_refused_with_what_is_there(found):
    assert "trainer.nnodes=4 with trainer.n_gpus_per_node=1" in found["refused"]
    assert "needs 4 Ray nodes with 0.6 Ray CPUs each; the Ray cluster has 3: " in found["refused"]
