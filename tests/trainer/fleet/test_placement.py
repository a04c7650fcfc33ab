"""Who runs where, as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from verl.trainer.fleet.placement import (
    Machine,
    num_replicas,
    other_machines,
    place_rollouts,
    refuse_missing_files,
    require_machines,
)
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig
from verl.workers.config.rollout import AgentConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker


def config_of(placement: str, **rollout: Any) -> PPOConfig:
    base = PPOConfig()
    policy = replace(base.actor_rollout_ref, rollout=replace(base.actor_rollout_ref.rollout, **rollout))
    trainer = replace(base.trainer, placement=placement, n_gpus_per_node=4)
    return replace(base, actor_rollout_ref=policy, trainer=trainer)


@pytest.mark.parametrize(
    ("placement", "device", "rollout", "expected"),
    [
        ("colocated", "cpu", {}, 1),
        ("colocated", "cuda", {}, 4),
        ("colocated", "cuda", {"tensor_model_parallel_size": 2}, 2),
        ("colocated", "cuda", {"data_parallel_size": 2}, 4),
        ("colocated", "cuda", {"data_parallel_size": 2, "expert_parallel_size": 2}, 2),
        (
            "colocated",
            "cuda",
            {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 2},
            2,
        ),
        (
            "colocated",
            "cuda",
            {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 4},
            1,
        ),
        ("separate", "cpu", {"nnodes": 3}, 3),
        ("separate", "cuda", {"nnodes": 2, "n_gpus_per_node": 8, "tensor_model_parallel_size": 4}, 4),
        ("separate", "cpu", {"nnodes": 2, "num_replicas": 5}, 5),
    ],
)
def test_there_are_as_many_replicas_as_the_ranks_allow(placement, device, rollout, expected):
    assert num_replicas(config_of(placement, **rollout), device) == expected


def test_colocated_replicas_share_one_arena_and_divide_the_trainers_devices():
    config = config_of("colocated", tensor_model_parallel_size=2)
    placed = place_rollouts(config, "cuda", replicas=2, trainer_nodes=["a"], all_nodes=["a", "b"])
    assert placed.nodes == ("a",)
    assert [replica.device_ids for replica in placed.replicas] == [("0", "1"), ("2", "3")]


def test_a_replica_of_data_parallel_ranks_has_a_device_for_each():
    config = config_of("colocated", data_parallel_size=2, expert_parallel_size=2)
    placed = place_rollouts(config, "cuda", replicas=2, trainer_nodes=["a"], all_nodes=["a"])
    assert [replica.device_ids for replica in placed.replicas] == [("0", "1"), ("2", "3")]


@pytest.mark.parametrize(
    ("device", "ranks", "devices", "warns"),
    [("cuda", 2, 8, True), ("cuda", 2, 2, False), ("cuda", 4, 8, False), ("cpu", 2, 8, False)],
)
def test_devices_that_the_default_number_of_ranks_leaves_idle_are_told(device, ranks, devices, warns, caplog):
    config = config_of("colocated")
    config = replace(config, trainer=replace(config.trainer, n_gpus_per_node=ranks))
    require_machines(config, device, [Machine(address="a", cpus=64, accelerators=devices)])
    said = "trainer.n_gpus_per_node=2, the default, has 2 trainer ranks on a machine with 8 cuda devices (verl: 8)"
    assert [record.message for record in caplog.records] == [said] * warns


@pytest.mark.parametrize(
    ("device", "replicas", "expected"),
    [
        ("cpu", 2, [("b", 0, ()), ("a", 0, ())]),
        ("cuda", 4, [("b", 0, ("0", "1")), ("a", 0, ("0", "1")), ("b", 1, ("2", "3")), ("a", 1, ("2", "3"))]),
    ],
)
def test_every_host_of_a_colocated_trainer_has_an_arena_and_replicas_on_its_own_devices(device, replicas, expected):
    config = config_of("colocated", tensor_model_parallel_size=2, nnodes=1)
    config = replace(config, trainer=replace(config.trainer, nnodes=2))
    assert num_replicas(config, device) == replicas
    placed = place_rollouts(config, device, replicas=replicas, trainer_nodes=["b", "a"], all_nodes=["a", "b", "c"])
    assert placed.nodes == ("b", "a")
    assert [(one.node_id, one.local_index, one.device_ids) for one in placed.replicas] == expected


def machines(*sizes: tuple[float, float]) -> list[Machine]:
    return [
        Machine(address=f"10.0.0.{index}", cpus=cpus, accelerators=devices)
        for index, (cpus, devices) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("nnodes", "placement", "device", "there", "missing"),
    [
        (1, "colocated", "cpu", [(2, 0)], None),
        (2, "colocated", "cpu", [(2, 0), (1.8, 0)], None),
        (2, "separate", "cpu", [(2, 0), (1.8, 0)], None),
        (2, "colocated", "cuda", [(8, 4), (8, 8)], None),
        (2, "separate", "cuda", [(8, 4), (8, 8), (8, 1)], None),
        (2, "colocated", "cpu", [(2, 0)], r"needs 2 Ray nodes with 1.6 Ray CPUs each; .* has 1: 10.0.0.0: 2 CPUs"),
        (2, "colocated", "cpu", [(2, 0), (1.5, 0)], r"trainer.num_cpus_per_rank=0.4 needs 2 .* 10.0.0.1: 1.5 CPUs"),
        (2, "colocated", "cuda", [(8, 4), (8, 3)], r"1.6 Ray CPUs and 4 cuda devices each; .* 8 CPUs, 3 devices"),
        (2, "separate", "cuda", [(8, 4), (8, 4)], r"trainer.placement=separate with rollout.nnodes=1 as many more"),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_what_is_there_and_what_is_needed(
    nnodes, placement, device, there, missing
):
    config = config_of(placement)
    config = replace(config, trainer=replace(config.trainer, nnodes=nnodes))
    if missing is None:
        require_machines(config, device, machines(*there))
        return
    with pytest.raises(ConfigError, match=missing):
        require_machines(config, device, machines(*there))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"num_cpus": 0.2}, None),
        ({"num_cpus": 3.0}, r"rollout.num_cpus=3 is more than any machine has; .* has 2: 10.0.0.0: 2 CPUs"),
        (
            {"num_cpus": 0.9, "num_replicas": 3},
            r"4 \* 0.4 \(trainer.num_cpus_per_rank\) .* = 4.45 Ray CPUs are more than 4;",
        ),
        ({"agent": AgentConfig(num_cpus=1000.0)}, "agent.num_cpus=1000 is more than any machine has"),
        ({"agent": AgentConfig(num_workers=100)}, r"100 \* 0.1 \(actor_rollout_ref.rollout.agent.num_cpus\)"),
    ],
)
def test_processes_for_which_ray_would_wait_for_ever_are_refused(rollout, message):
    config = config_of("colocated", **rollout)
    if message is None:
        require_machines(config, "cpu", machines((2, 0), (2, 0)))
        return
    with pytest.raises(ConfigError, match=message):
        require_machines(config, "cpu", machines((2, 0), (2, 0)))


@pytest.mark.parametrize(
    ("all_nodes", "nodes", "local"),
    [
        (["a", "b", "c"], ("b", "c"), [(0, 0, 2), (1, 0, 1), (0, 1, 2)]),  # machines of their own
        (["a", "b"], ("b", "b"), [(0, 0, 3), (1, 1, 3), (0, 2, 3)]),  # two arenas on the one that is left
        (["a"], ("a", "a"), [(0, 0, 3), (1, 1, 3), (0, 2, 3)]),  # everything on one machine
    ],
)
def test_separate_replicas_are_dealt_out_to_machines_without_trainer_ranks(all_nodes, nodes, local):
    config = config_of("separate", nnodes=2)
    placed = place_rollouts(config, "cpu", replicas=3, trainer_nodes=["a"], all_nodes=all_nodes)
    assert placed.nodes == nodes
    assert [(one.node_index, one.local_index, one.local_count) for one in placed.replicas] == local
    assert [one.node_id for one in placed.replicas] == [nodes[one.node_index] for one in placed.replicas]


def test_accelerators_need_machines_of_their_own():
    with pytest.raises(ConfigError, match=r"rollout.nnodes=2 needs that many machines.*the cluster has 1"):
        place_rollouts(
            config_of("separate", nnodes=2),
            "cuda",
            replicas=2,
            trainer_nodes=["a"],
            all_nodes=["a", "b"],
        )


def test_what_a_host_does_not_see_is_named_with_its_key():
    keys = {"/m": "actor_rollout_ref.model.path=/m", "/out/token": "trainer.default_local_dir=/out (for checkpoints)"}
    refuse_missing_files(keys, {"10.0.0.1": [], "10.0.0.2": []})
    with pytest.raises(ConfigError, match=r"default_local_dir=/out \(for checkpoints\) is not there on 10\.0\.0\.2"):
        refuse_missing_files(keys, {"10.0.0.1": [], "10.0.0.2": ["/out/token"]})


def test_a_rank_tells_which_files_it_does_not_see(tmp_path):
    assert ActorRolloutRefWorker.missing_files(None, [str(tmp_path), str(tmp_path / "no")]) == [str(tmp_path / "no")]


HOSTS = {name: Machine(address=name, cpus=4, accelerators=8) for name in "abcd"}


@pytest.mark.parametrize(
    ("placement", "device", "lost", "left", "machines", "expected"),
    [
        ("separate", "cuda", {"gone": 2}, "b", HOSTS, {"gone": "c"}),
        ("separate", "cuda", {"gone": 2, "gone too": 2}, "b", HOSTS, {"gone": "c", "gone too": "d"}),
        ("separate", "cuda", {"gone": 2, "gone too": 2}, "bc", HOSTS, {"gone": "d"}),  # as far as there are any
        ("separate", "cuda", {"gone": 2}, "b", {"c": replace(HOSTS["c"], accelerators=1)}, {}),  # with as many devices
        ("separate", "cpu", {"gone": 9}, "b", HOSTS, {}),  # and CPUs
        ("separate", "cuda", {"gone": 2}, "bcd", HOSTS, {}),
        ("separate", "cuda", {"gone": 2}, "", {"a": HOSTS["a"]}, {}),  # the trainer has its devices
        ("separate", "cpu", {"gone": 2}, "", {"a": HOSTS["a"]}, {"gone": "a"}),  # but on cpu rollouts may be beside it
        ("separate", "cpu", {"gone": 2}, "b", {name: HOSTS[name] for name in "ab"}, {}),  # when there are no others
        ("colocated", "cuda", {"gone": 2}, "b", HOSTS, {}),
        ("separate", "cuda", {}, "b", HOSTS, {}),
    ],
)
def test_rollouts_of_a_machine_that_is_gone_go_to_one_that_nobody_uses(
    placement, device, lost, left, machines, expected
):
    config = config_of(placement, num_cpus=1.0)
    found = other_machines(config, device, lost, rollout_nodes=left, trainer_nodes="a", machines=machines)
    assert found == expected
