"""Checks whether trainer ranks and rollout engines fit their machines."""

from __future__ import annotations

from collections.abc import Iterator

from verl.workers.config import PPOConfig


def placement(config: PPOConfig) -> Iterator[str]:
    if not config.actor_rollout_ref.hybrid_engine and config.trainer.placement == "colocated":
        yield (
            "actor_rollout_ref.hybrid_engine=false: rollout engines have machines of their own in "
            "verl.experimental.one_step_off_policy.main_ppo and in "
            "verl.experimental.fully_async_policy.fully_async_main, or with trainer.placement=separate"
        )


def counts(config: PPOConfig) -> Iterator[str]:
    """Sharding groups divide the trainer ranks; on accelerators, so do colocated replicas."""
    from verl.utils.device import resolve_device

    ranks, rollout = config.trainer.world_size, config.actor_rollout_ref.rollout
    for path, section in (("actor", config.actor_rollout_ref.actor), ("ref", config.actor_rollout_ref.ref)):
        size = section.fsdp_config.fsdp_size
        if size != -1 and (size <= 0 or ranks % size):
            yield f"actor_rollout_ref.{path}.fsdp_config.fsdp_size={size} does not divide {ranks} trainer ranks"
    colocated = config.trainer.placement == "colocated"
    if colocated and rollout.nnodes != 1:
        yield (
            f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} needs trainer.placement=separate: "
            "rollout engines share the trainer's machines"
        )
    if resolve_device(config.trainer.device) == "cpu":
        return
    parallel, sizes = rollout.replica_ranks, "tensor_model_parallel_size"
    sizes += " * data_parallel_size" if rollout.data_ranks > 1 else ""
    per_node = config.trainer.n_gpus_per_node if colocated else rollout.n_gpus_per_node
    devices = ranks if colocated else rollout.nnodes * per_node
    owner = f"{ranks} trainer ranks" if colocated else f"{devices} rollout devices"
    if per_node % parallel:
        what = "trainer ranks" if colocated else "rollout devices"
        yield (f"actor_rollout_ref.rollout.{sizes}={parallel} does not divide {per_node} {what} of one machine")
    elif rollout.num_replicas is not None and rollout.num_replicas * parallel > devices:
        yield (
            f"actor_rollout_ref.rollout.num_replicas={rollout.num_replicas} * {sizes}={parallel} = "
            f"{rollout.num_replicas * parallel} exceeds {owner}"
        )


def experts(config: PPOConfig) -> Iterator[str]:
    problem = config.actor_rollout_ref.rollout.why_not_dealt()
    if problem is not None:
        yield problem
