"""Keys that verl has and this project has not, so that a verl user's script is told so instead of being misunderstood.

Only consulted for keys that are unknown here. An entry that ends in `.*` covers the section and everything below it;
the most specific entry wins. The text says what to use instead, or why nothing is needed.
"""

from __future__ import annotations

_POLICY = "actor_rollout_ref"
_WHOLE_SEQUENCES = "sequences are not split over ranks; the nearest is"
_MEGATRON = f"{_POLICY}.actor.megatron"
_STAYS = "what a rank holds of the model stays on its device"
_CORRECTION = "algorithm.rollout_correction"

VERL_KEYS: dict[str, str] = {
    f"{_MEGATRON}.virtual_pipeline_model_parallel_size": "every stage is one run of layers",
    f"{_MEGATRON}.context_parallel_size": f"{_WHOLE_SEQUENCES} {_POLICY}.actor.ppo_max_token_len_per_gpu",
    f"{_MEGATRON}.use_dist_checkpointing": "checkpoints are torch's distributed ones, which any layout of ranks loads",
    f"{_MEGATRON}.use_mbridge": "Hugging Face directories are read and written as they are",
    f"{_MEGATRON}.param_offload": _STAYS,
    f"{_MEGATRON}.grad_offload": _STAYS,
    f"{_MEGATRON}.optimizer_offload": _STAYS,
    f"{_MEGATRON}.override_transformer_config.*": f"the nearest are the other keys of {_MEGATRON}",
    f"{_MEGATRON}.seed": "the nearest is trainer.seed",
    f"{_POLICY}.ref.megatron.param_offload": _STAYS,
    f"{_POLICY}.ref.megatron.sequence_parallel": f"the reference policy is cut like the actor; see {_MEGATRON}",
    f"{_POLICY}.actor.ulysses_sequence_parallel_size": f"{_WHOLE_SEQUENCES} {_POLICY}.actor.ppo_max_token_len_per_gpu",
    f"{_POLICY}.ref.ulysses_sequence_parallel_size": f"{_WHOLE_SEQUENCES} {_POLICY}.ref.log_prob_max_token_len_per_gpu",
    "trainer.profile_steps": "it is global_profiler.steps",
    "global_profiler.profile_continuous_steps": "every step has a trace of its own; see global_profiler.steps",
    "global_profiler.global_tool_config.*": "torch's profiler is taken with its defaults",
    f"{_POLICY}.actor.profiler.tool": "it is global_profiler.tool",
    f"{_POLICY}.actor.profiler.save_path": "it is global_profiler.save_path",
    f"{_POLICY}.actor.profiler.tool_config.*": "torch's profiler is taken with its defaults",
    f"{_POLICY}.ref.profiler.*": f"the reference policy is in the traces of {_POLICY}.actor.profiler",
    f"{_POLICY}.rollout.profiler.*": f"rollout engines are not traced; the nearest is {_POLICY}.actor.profiler",
    "critic.profiler.*": f"the critic is in the traces of {_POLICY}.actor.profiler",
    f"{_POLICY}.actor.checkpoint.async_save": "checkpoints are written before the next step begins",
    f"{_POLICY}.rollout.data_parallel_size": f"the nearest is {_POLICY}.rollout.num_replicas",
    f"{_POLICY}.rollout.pipeline_model_parallel_size": f"the nearest is {_POLICY}.rollout.tensor_model_parallel_size",
    f"{_POLICY}.rollout.expert_parallel_size": f"the nearest is {_POLICY}.rollout.tensor_model_parallel_size",
    f"{_CORRECTION}.rollout_rs": f"the nearest is {_CORRECTION}.rollout_is",
    f"{_CORRECTION}.rollout_rs_threshold": f"the nearest is {_CORRECTION}.rollout_is_threshold",
    f"{_CORRECTION}.bypass_mode": f"the nearest is {_POLICY}.actor.use_rollout_log_probs",
    "algorithm.filter_groups.*": "no groups are filtered out of a batch",
    "critic.megatron.*": f"a critic with strategy=megatron is cut like the actor; see {_POLICY}.actor.megatron",
    "critic.ulysses_sequence_parallel_size": f"{_WHOLE_SEQUENCES} critic.ppo_max_token_len_per_gpu",
    "critic.model.lora_rank": "the critic is trained whole; the policy may have LoRA",
    "rollout.*": f"it belongs to trainers with machines of their own for rollouts; here it is {_POLICY}.rollout.*",
    "async_training.use_trainer_do_validate": "the rollout engines validate",
}


def verl_key_message(dotted: str) -> str | None:
    """The error text for a key of verl that is not supported here; None for a key that verl has not either."""
    text = VERL_KEYS.get(dotted)
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        if text is not None:
            break
        text = VERL_KEYS.get(".".join(parts[:length]) + ".*")
    return None if text is None else f"verl key {dotted!r} is not supported here: {text}"
