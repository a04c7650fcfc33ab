"""Where rollout nodes and replicas run, as data: `trainer.placement`. Functions over the names of machines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from verl.trainer.fleet.counts import num_replicas
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig
from verl.workers.config.trainer import TrainerConfig
from verl.workers.rollout import Placement
from verl.workers.weight_sync.node import NODE_CPUS

logger = logging.getLogger(__name__)

ROUNDING = 1e-3
"""Ray counts CPUs in ten-thousandths."""


@dataclass(frozen=True)
class RolloutPlacement:
    """`nodes[i]` is the Ray node of rollout node i, which owns one arena; `replicas[j]` says where replica j runs."""

    nodes: tuple[str, ...]
    replicas: tuple[Placement, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The total resources of a Ray node, in use or not."""

    address: str
    cpus: float
    accelerators: float


def require_machines(config: PPOConfig, device: str, machines: Sequence[Machine]) -> None:
    """Raises ConfigError, with what exists and what is needed, if the run's processes can never be placed.

    Warns of accelerators that the default of `trainer.n_gpus_per_node` leaves idle.
    """
    _require_machines_of_trainer(config, device, machines)
    _require_cpus(config, device, machines)
    ranks, most = config.trainer.n_gpus_per_node, max(one.accelerators for one in machines)
    if device != "cpu" and ranks == TrainerConfig.n_gpus_per_node < most:
        logger.warning(
            "trainer.n_gpus_per_node=%d, the default, has %d trainer ranks on a machine with %d %s devices (verl: 8)",
            *(ranks, ranks, most, device),
        )


def _require_machines_of_trainer(config: PPOConfig, device: str, machines: Sequence[Machine]) -> None:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    cpus = trainer.n_gpus_per_node * trainer.num_cpus_per_rank
    accelerators = 0 if device == "cpu" else trainer.n_gpus_per_node
    large = [one for one in machines if one.cpus >= cpus and one.accelerators >= accelerators]
    # On cpu, rollout engines of their own may share a machine with the trainer.
    separate = rollout.nnodes if trainer.placement == "separate" and device != "cpu" else 0
    if len(large) >= trainer.nnodes and len(machines) >= trainer.nnodes + separate:
        return
    each = f"{cpus:g} Ray CPUs" + (f" and {accelerators} {device} devices" if accelerators else "")
    needed = (
        f"trainer.nnodes={trainer.nnodes} with trainer.n_gpus_per_node={trainer.n_gpus_per_node} ranks of "
        f"trainer.num_cpus_per_rank={trainer.num_cpus_per_rank:g} needs {trainer.nnodes} Ray nodes with {each} each"
    )
    if separate:
        needed += f", and trainer.placement=separate with rollout.nnodes={separate} as many more for the rollouts"
    raise ConfigError(f"{needed}; {_told(machines)}")


def _require_cpus(config: PPOConfig, device: str, machines: Sequence[Machine]) -> None:
    """Ray would let a process wait for ever that asks for more CPUs than are left when all others have theirs."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    nodes = rollout.nnodes if trainer.placement == "separate" else trainer.nnodes
    wanted = [
        (trainer.world_size, "trainer.num_cpus_per_rank", trainer.num_cpus_per_rank),
        (num_replicas(config, device), "actor_rollout_ref.rollout.num_cpus", rollout.num_cpus),
        (rollout.agent.num_workers, "actor_rollout_ref.rollout.agent.num_cpus", rollout.agent.num_cpus),
        (nodes, "rollout node", NODE_CPUS),
    ]
    largest = max(one.cpus for one in machines)
    for _, key, cpus in wanted:
        if cpus > largest:
            raise ConfigError(f"{key}={cpus:g} is more than any machine has; {_told(machines)}")
    needed, there = sum(count * cpus for count, _, cpus in wanted), sum(one.cpus for one in machines)
    if needed > there + ROUNDING:
        terms = " + ".join(f"{count} * {cpus:g} ({key})" for count, key, cpus in wanted)
        raise ConfigError(f"{terms} = {needed:g} Ray CPUs are more than {there:g}; {_told(machines)}")


def _told(machines: Sequence[Machine]) -> str:
    present = "; ".join(f"{one.address}: {one.cpus:g} CPUs, {one.accelerators:g} devices" for one in machines)
    return (
        f"the Ray cluster has {len(machines)}: {present}. Connect to one that is large enough with "
        "ray_kwargs.ray_init.address"
    )


def refuse_missing_files(keys: Mapping[str, str], missing: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError if any host lacks any file. `missing` has the paths by host, `keys` the key of each path."""
    problems = [f"{keys[path]} is not there on {host}" for host, paths in missing.items() for path in paths]
    if problems:
        raise ConfigError("a trainer on several machines needs a file system that they share: " + "; ".join(problems))


def place_rollouts(
    config: PPOConfig,
    device: str,
    *,
    replicas: int,
    trainer_nodes: Sequence[str],
    all_nodes: Sequence[str],
) -> RolloutPlacement:
    """Place the rollouts on Ray nodes, by name; `trainer_nodes` have the trainer ranks, in the order of ranks.

    `colocated`: one arena on each of `trainer_nodes`, replicas dealt out among them, on the trainer's devices.
    `separate`: `rollout.nnodes` arenas with the replicas dealt out among them, on machines without trainer ranks if
    there are any, else (on cpu) beside them. Raises ConfigError if accelerators require more machines than Ray has.
    """
    if config.trainer.placement == "colocated":
        nodes = tuple(trainer_nodes)
        ranks = config.actor_rollout_ref.rollout.replica_ranks
        return RolloutPlacement(nodes, _deal(nodes, replicas, ranks_on_trainer=0 if device == "cpu" else ranks))
    wanted = config.actor_rollout_ref.rollout.nnodes
    free = [node for node in all_nodes if node not in set(trainer_nodes)]
    if len(free) < wanted and device != "cpu":
        raise ConfigError(
            f"trainer.placement=separate with rollout.nnodes={wanted} needs that many machines beside those of the "
            f"trainer; the cluster has {len(free)}"
        )
    hosts = free or list(all_nodes)
    nodes = tuple(hosts[index % len(hosts)] for index in range(wanted))
    return RolloutPlacement(nodes, _deal(nodes, replicas))


def place_another(nodes: Mapping[int, str], present: Sequence[Placement]) -> Placement:
    """Place one more replica, with its own devices or none, at the rollout node with the fewest `present`.

    `nodes` has the Ray node of each rollout node, by index. Only the new replica gets a new share of the cores.
    """
    on_node = Counter(place.node_index for place in present)
    index = min(nodes, key=lambda node: on_node[node])
    taken = {place.local_index for place in present if place.node_id == nodes[index]}
    return Placement(
        node_index=index,
        local_index=next(free for free in range(len(taken) + 1) if free not in taken),
        local_count=len(taken) + 1,
        node_id=nodes[index],
    )


def other_machines(
    config: PPOConfig,
    device: str,
    lost: Mapping[str, int],
    *,
    rollout_nodes: Collection[str],
    trainer_nodes: Collection[str],
    machines: Mapping[str, Machine],
) -> dict[str, str]:
    """A replacement for each lost machine, by its name; omits those for which there is none.

    `lost` has the number of replicas on each. A replacement is large enough, and has neither trainer ranks nor one of
    the remaining `rollout_nodes`. If none of these remains, on cpu it may have trainer ranks, as at the start. With
    `colocated` there is no replacement: rollouts are on the trainer's devices.
    """
    if config.trainer.placement == "colocated" or not lost:
        return {}
    rollout, replicas = config.actor_rollout_ref.rollout, max(lost.values())
    cpus = NODE_CPUS + replicas * rollout.num_cpus
    accelerators = 0 if device == "cpu" else replicas * rollout.replica_ranks
    large = [name for name, one in machines.items() if one.cpus >= cpus and one.accelerators >= accelerators]
    others = [name for name in large if name not in {*trainer_nodes, *rollout_nodes}]
    if not others and not rollout_nodes and device == "cpu":
        others = large
    return dict(zip(lost, others, strict=False))


def _deal(nodes: Sequence[str], replicas: int, *, ranks_on_trainer: int = 0) -> tuple[Placement, ...]:
    """Replica i goes to rollout node i modulo their number, and there takes the next `ranks_on_trainer` devices."""
    on_host = Counter(nodes[index % len(nodes)] for index in range(replicas))
    seen: Counter[str] = Counter()
    placements = []
    for index in range(replicas):
        node = nodes[index % len(nodes)]
        first = seen[node] * ranks_on_trainer
        placements.append(
            Placement(
                node_index=index % len(nodes),
                local_index=seen[node],
                local_count=on_host[node],
                node_id=node,
                device_ids=tuple(str(rank) for rank in range(first, first + ranks_on_trainer)),
            )
        )
        seen[node] += 1
    return tuple(placements)
