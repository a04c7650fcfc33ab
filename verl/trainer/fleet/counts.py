"""How many engines a run has, by its configuration alone. Imports neither Ray nor torch, for `--check`."""

from __future__ import annotations

from verl.workers.config import PPOConfig
from verl.workers.config.distillation import TeacherConfig


def num_replicas(config: PPOConfig, device: str) -> int:
    """`rollout.num_replicas`, or as many as the ranks allow; on cpu one per rollout node."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.num_replicas is not None:
        return rollout.num_replicas
    if config.trainer.placement == "colocated":
        per_node = 1 if device == "cpu" else config.trainer.n_gpus_per_node // rollout.replica_ranks
        return config.trainer.nnodes * per_node
    per_node = 1 if device == "cpu" else rollout.n_gpus_per_node // rollout.replica_ranks
    return rollout.nnodes * per_node


def num_reward_engines(config: PPOConfig, device: str) -> int:
    """The number of engines of the reward model that the devices allow; on cpu one per machine."""
    settings, trainer = config.reward_model, config.trainer
    own = settings.enable_resource_pool
    nodes = settings.nnodes if own else trainer.nnodes
    if device == "cpu":
        return nodes
    per_node = settings.n_gpus_per_node if own else trainer.n_gpus_per_node
    return nodes * (per_node // settings.rollout.tensor_model_parallel_size)


def num_teacher_engines(config: PPOConfig, teacher: TeacherConfig, device: str) -> int:
    """The number of one teacher's engines. On cpu, without devices to count, one per machine by default."""
    if teacher.num_replicas:
        return teacher.num_replicas * teacher.inference.data_parallel_size
    if device == "cpu":
        return max(config.distillation.nnodes, 1)
    return config.distillation.num_devices // teacher.inference.tensor_model_parallel_size
