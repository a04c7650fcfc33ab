"""Keys that verl and this project share, but whose values have other names here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.trainer.config.from_verl.conversions import (
    critic_strategy,
    divides_ranks,
    dtype_name,
    dtype_of,
    format_of_load,
    kl_name,
    loggers,
    off_as_minus_1,
    policy_loss,
    profiled_ranks,
    profiled_steps,
    profiler_tool,
    profiles,
    profiles_rollouts,
    rejections,
)
from verl.trainer.config.from_verl.rules import Values
from verl.trainer.config.from_verl.sections import ACTOR, CORRECTION, MEGATRON, POLICY, REF, ROLLOUT

_ALONE = "distillation.distillation_loss.use_task_rewards=false: the distillation loss is the whole loss"


def _only_distils(at: Values) -> bool:
    return at("distillation.enabled") is True and at("distillation.distillation_loss.use_task_rewards") is False


SPELLINGS: dict[str, Callable[[Any, Values], Any]] = {
    f"{ROLLOUT}.load_format": format_of_load,
    f"{ACTOR}.use_kl_loss": lambda value, at: False if value is True and _only_distils(at) else value,
    f"{ACTOR}.entropy_coeff": lambda value, at: 0.0 if value and _only_distils(at) else value,
    "trainer.logger": loggers,
    f"{ROLLOUT}.profiler.enable": profiles_rollouts,
    f"{ACTOR}.profiler.ranks": profiled_ranks,
    f"{ACTOR}.profiler.enable": profiles,
    "global_profiler.steps": profiled_steps,
    "global_profiler.tool": profiler_tool,
    f"{ACTOR}.kl_loss_type": kl_name,
    "algorithm.kl_penalty": kl_name,
    **{
        f"{section}.model_dtype": dtype_name
        for section in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp", MEGATRON)
    },
    **{f"{section}.dtype": dtype_of for section in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")},
    **{
        f"{section}.fsdp_size": divides_ranks
        for section in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
    },
    f"{MEGATRON}.use_dist_checkpointing": lambda value, at: (
        value if value is not True or at(f"{MEGATRON}.dist_checkpointing_path") else False
    ),
    f"{MEGATRON}.dist_checkpointing_path": lambda value, at: value or None,
    "critic.strategy": critic_strategy,
    f"{POLICY}.model.lora_alpha": lambda value, at: value if at(f"{POLICY}.model.lora_rank") or value else 16,
    f"{ROLLOUT}.mode": lambda value, at: "async" if value == "sync" else value,
    f"{ACTOR}.optim.lr_warmup_steps": lambda value, at: -1 if value is None else value,
    "critic.optim.lr_warmup_steps": lambda value, at: -1 if value is None else value,
    "trainer.resume_from_path": lambda value, at: value if at("trainer.resume_mode") == "resume_path" else None,
    "trainer.test_freq": off_as_minus_1,
    "trainer.save_freq": off_as_minus_1,
    f"{CORRECTION}.rollout_rs": rejections,
    f"{ACTOR}.policy_loss.loss_mode": policy_loss,
    f"{CORRECTION}.rollout_is_threshold": lambda value, at: 2.0 if value is None else value,
}


REASONS = {
    f"{ACTOR}.use_kl_loss": _ALONE,
    f"{ACTOR}.entropy_coeff": _ALONE,
    f"{ROLLOUT}.profiler.enable": "nothing is traced: rollout engines are in the steps of global_profiler.tool=torch",
    f"{MEGATRON}.use_dist_checkpointing": f"{MEGATRON}.dist_checkpointing_path is not set: weights are read from the "
    f"Hugging Face directory {POLICY}.model.path",
    f"{ACTOR}.profiler.ranks": f"{ACTOR}.profiler.all_ranks=true has them all",
    f"{ACTOR}.profiler.enable": "nothing is traced: no step is named in global_profiler.steps, or there is no device "
    "here that global_profiler.tool traces",
    "global_profiler.steps": f"nothing is traced: {ACTOR}.profiler.enable=false",
    "global_profiler.tool": "nothing is traced",
    "trainer.resume_from_path": "only trainer.resume_mode=resume_path goes on from there",
}
"""Why a value of `SPELLINGS` has another name here, where that is not obvious."""
