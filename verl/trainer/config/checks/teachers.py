"""Checks whether the teachers of a run fit their devices, the data, and the training engine."""

from __future__ import annotations

from collections.abc import Iterator

from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig
from verl.workers.config.distillation import ONLY_TEACHER, TeacherConfig


def distillation(config: PPOConfig) -> Iterator[str]:
    """A line for each problem with the teachers of a run."""
    from verl.utils.device import resolve_device

    chosen = config.distillation
    if not chosen.enabled:
        return
    path = "distillation.teacher_models"
    try:
        teachers = chosen.teachers
    except ConfigError as exc:
        yield from str(exc).splitlines()
        return
    if not teachers:
        yield f"distillation.enabled=true needs a teacher: {path}.teacher_model.model_path"
    if not chosen.nnodes:
        yield "distillation.enabled=true needs distillation.nnodes, 1 or more"
    if len(teachers) > 1 and ONLY_TEACHER in teachers:
        yield (
            f"{path}.{ONLY_TEACHER} is the name of a single teacher, and verl ignores it beside others: choose "
            "another name"
        )
    keys = [teacher.key for teacher in teachers.values()]
    for name, teacher in teachers.items():
        yield from _teacher(config, f"{path}.{name}", teacher, several=len(teachers) > 1)
        if len(teachers) > 1 and teacher.key is not None and keys.count(teacher.key) > 1:
            yield f"{path}.{name}.key={teacher.key} is another teacher's, too"
    used = sum(teacher.num_replicas * teacher.ranks_per_replica for teacher in teachers.values())
    counted = all(teacher.num_replicas for teacher in teachers.values())
    if resolve_device(config.trainer.device) != "cpu" and counted and used != chosen.num_devices:
        yield (
            f"distillation.nnodes={chosen.nnodes} * distillation.n_gpus_per_node={chosen.n_gpus_per_node} are "
            f"{chosen.num_devices} devices, and the replicas of {path} have {used}"
        )
    loss, strategy = chosen.distillation_loss, config.actor_rollout_ref.actor.strategy
    if loss.uses_topk and strategy == "megatron":
        yield (
            f"distillation.distillation_loss.loss_mode={loss.loss_mode} needs actor_rollout_ref.actor.strategy=fsdp or "
            "fsdp2: Megatron's engine returns log-probs of response tokens only"
        )


def _teacher(config: PPOConfig, key: str, teacher: TeacherConfig, *, several: bool) -> Iterator[str]:
    from verl.utils.device import resolve_device

    inference, longest = teacher.inference, config.data.max_prompt_length + config.data.max_response_length + 1
    ranks, devices = inference.tensor_model_parallel_size, config.distillation.n_gpus_per_node
    if teacher.model_path is None:
        yield f"{key} needs {key}.model_path"
    if several and not teacher.key:
        yield f"{key}.key must select its samples, by distillation.teacher_key"
    if several and not teacher.num_replicas:
        yield f"{key}.num_replicas must say how many of the devices are its own"
    if (inference.max_model_len or longest) < longest:
        yield (
            f"{key}.inference.max_model_len={inference.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length + 1 = {longest}"
        )
    if inference.expert_parallel_size not in (1, ranks):
        yield (
            f"{key}.inference.expert_parallel_size={inference.expert_parallel_size} is neither 1 nor "
            f"tensor_model_parallel_size={ranks}, the ranks of an engine"
        )
    if others := sorted(set(inference.engine_kwargs) - {"vllm"}):
        yield f"{key}.inference.engine_kwargs.{others[0]}: teachers are served by vllm"
    if resolve_device(config.trainer.device) == "cpu":
        return
    if devices % ranks:
        yield (
            f"{key}.inference.tensor_model_parallel_size={ranks} does not divide distillation.n_gpus_per_node={devices}"
        )
    elif not teacher.num_replicas and (config.distillation.num_devices // ranks) % inference.data_parallel_size:
        yield (
            f"{key}.inference.data_parallel_size={inference.data_parallel_size} does not divide the "
            f"{config.distillation.num_devices // ranks} engines of the teacher"
        )
