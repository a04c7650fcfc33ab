"""Where rollout nodes and replicas run, as data: `trainer.placement`. Pure functions over the names of machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig
from verl.workers.rollout import Placement


@dataclass(frozen=True)
class RolloutPlacement:
    """`nodes[i]` is the Ray node of rollout node i, which owns one arena; `replicas[j]` says where replica j runs."""

    nodes: tuple[str, ...]
    replicas: tuple[Placement, ...]


def num_replicas(config: PPOConfig, device: str) -> int:
    """`rollout.num_replicas`, or as many as the ranks allow; on cpu one per rollout node."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.num_replicas is not None:
        return rollout.num_replicas
    if config.trainer.placement == "colocated":
        return 1 if device == "cpu" else config.trainer.world_size // rollout.tensor_model_parallel_size
    per_node = 1 if device == "cpu" else rollout.n_gpus_per_node // rollout.tensor_model_parallel_size
    return rollout.nnodes * per_node


def place_rollouts(
    config: PPOConfig,
    device: str,
    *,
    replicas: int,
    driver: str,
    trainer_nodes: Sequence[str],
    all_nodes: Sequence[str],
) -> RolloutPlacement:
    """Names are those of Ray nodes; `trainer_nodes` carry trainer ranks.

    `colocated`: one arena next to the trainer, replicas on its devices. `separate`: `rollout.nnodes` arenas with the
    replicas dealt out among them, on machines without trainer ranks if there are any, else (on cpu) beside them.
    Raises ConfigError if accelerators need more machines than there are.
    """
    if config.trainer.placement == "colocated":
        return RolloutPlacement((driver,), tuple(_colocated(config, device, replicas)))
    wanted = config.actor_rollout_ref.rollout.nnodes
    free = [node for node in all_nodes if node not in set(trainer_nodes)]
    if len(free) < wanted and device != "cpu":
        raise ConfigError(
            f"trainer.placement=separate with rollout.nnodes={wanted} needs that many machines beside those of the "
            f"trainer; the cluster has {len(free)}"
        )
    hosts = free or list(all_nodes)
    nodes = tuple(hosts[index % len(hosts)] for index in range(wanted))
    on_host = Counter(nodes[index % wanted] for index in range(replicas))
    seen: Counter[str] = Counter()
    placements = []
    for index in range(replicas):
        node = nodes[index % wanted]
        placements.append(
            Placement(node_index=index % wanted, local_index=seen[node], local_count=on_host[node], node_id=node)
        )
        seen[node] += 1
    return RolloutPlacement(nodes, tuple(placements))


def _colocated(config: PPOConfig, device: str, replicas: int) -> list[Placement]:
    ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return [
        Placement(
            local_index=index,
            local_count=replicas,
            device_ids=()
            if device == "cpu"
            else tuple(str(rank) for rank in range(index * ranks, (index + 1) * ranks)),
        )
        for index in range(replicas)
    ]
