"""Who runs where, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl.trainer.ppo.placement import num_replicas, place_rollouts
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig


def config_of(placement: str, **rollout: int) -> PPOConfig:
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
        ("separate", "cpu", {"nnodes": 3}, 3),
        ("separate", "cuda", {"nnodes": 2, "n_gpus_per_node": 8, "tensor_model_parallel_size": 4}, 4),
        ("separate", "cpu", {"nnodes": 2, "num_replicas": 5}, 5),
    ],
)
def test_there_are_as_many_replicas_as_the_ranks_allow(placement, device, rollout, expected):
    assert num_replicas(config_of(placement, **rollout), device) == expected


def test_colocated_replicas_share_one_arena_and_divide_the_trainers_devices():
    config = config_of("colocated", tensor_model_parallel_size=2)
    placed = place_rollouts(config, "cuda", replicas=2, driver="a", trainer_nodes=["a"], all_nodes=["a", "b"])
    assert placed.nodes == ("a",)
    assert [replica.device_ids for replica in placed.replicas] == [("0", "1"), ("2", "3")]


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
    placed = place_rollouts(config, "cpu", replicas=3, driver="a", trainer_nodes=["a"], all_nodes=all_nodes)
    assert placed.nodes == nodes
    assert [(one.node_index, one.local_index, one.local_count) for one in placed.replicas] == local
    assert [one.node_id for one in placed.replicas] == [nodes[one.node_index] for one in placed.replicas]


def test_accelerators_need_machines_of_their_own():
    with pytest.raises(ConfigError, match=r"rollout.nnodes=2 needs that many machines.*the cluster has 1"):
        place_rollouts(
            config_of("separate", nnodes=2),
            "cuda",
            replicas=2,
            driver="a",
            trainer_nodes=["a"],
            all_nodes=["a", "b"],
        )
