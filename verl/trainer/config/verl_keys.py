"""Keys of verl that are not keys here: where they went, why they change nothing, or why they are refused.

A script of verl's is told so instead of being misunderstood. One table, as data; `verl.trainer.config.verl_rules` has
the kinds of rules, `verl.trainer.config.translation` applies them. docs/coming-from-verl.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from verl.trainer.config.verl_conversions import (
    adapters_alike,
    at_most_turns,
    below_lora,
    by_ranks,
    computed_in,
    critic_strategy,
    divides_ranks,
    dtype_name,
    dtype_of,
    engine_of,
    format_of_load,
    fsdp_strategy,
    is_actors,
    kl_name,
    loggers,
    of_same_checkpoint,
    off_as_minus_1,
    on_lr,
    one_of,
    profiled_ranks,
    profiled_steps,
    profiler_tool,
    profiles,
    profiles_rollouts,
    rejections,
    same_family,
    scheduler,
    scraped,
    shared_by,
)
from verl.trainer.config.verl_rules import Moved, NoEffect, Refused, Rule, Values
from verl.workers.config import MegatronConfig, RefMegatronConfig

_POLICY = "actor_rollout_ref"
_ACTOR = f"{_POLICY}.actor"
_REF = f"{_POLICY}.ref"
_ROLLOUT = f"{_POLICY}.rollout"
_MEGATRON = f"{_ACTOR}.megatron"
_CORRECTION = "algorithm.rollout_correction"
_REWARD = "reward_model"

_MORE_THAN_1 = "sequences are not split over ranks, each is computed whole on its rank: the same numbers, more memory"
_ON_DEVICE = "stays on its device all the time: the same numbers, more memory"
_OTHER_ENGINES = "training engines are fsdp, fsdp2 and megatron"


_OF_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_FUSED = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "bias_swiglu_fusion",
    "cross_entropy_loss_fusion",
    "deallocate_pipeline_outputs",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_enable_deepep",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "persist_layer_norm",
    "tp_comm_overlap",
    "use_flash_attn",
    "use_fused_rotary_pos_emb",
)


def _is(*values: Any) -> Callable[[Any, Values], bool]:
    return one_of(values)


def _above_1(value: Any, _: Values) -> bool:
    return isinstance(value, int) and value > 1


def _true(value: Any, _: Values) -> bool:
    return value is True


def _off(what: str) -> NoEffect:
    """A feature that is not here, in the words that switch it off."""
    return NoEffect(why="it is off", only=_is(False, None), otherwise=what)


def _disabled(section: str, what: str, switch: str = "enable") -> dict[str, Rule]:
    """A feature that is not here: everything below `section` is nothing as long as its `switch` is off."""
    return {
        f"{section}.{switch}": _off(what),
        f"{section}.*": NoEffect(why=f"only with {section}.{switch}=true, which is not possible here"),
    }


def _offloading(section: str) -> dict[str, Rule]:
    held = {"param_offload": "parameters", "grad_offload": "gradients", "optimizer_offload": "optimizer state"}
    return {f"{section}.{key}": NoEffect(why=f"{what}: {_ON_DEVICE}", costs=_true) for key, what in held.items()}


def _of_megatron(section: str) -> dict[str, Rule]:
    """What every `megatron` section of verl has."""
    return {
        f"{section}.context_parallel_size": NoEffect(why=_MORE_THAN_1, costs=_above_1),
        **_offloading(section),
        f"{section}.virtual_pipeline_model_parallel_size": NoEffect(
            why="every stage is one run of layers: the same numbers, more waiting between stages", costs=_above_1
        ),
        f"{section}.use_mbridge": NoEffect(why="Hugging Face directories are read and written as they are"),
        f"{section}.vanilla_mbridge": NoEffect(why="Hugging Face directories are read and written as they are"),
        f"{section}.use_remove_padding": NoEffect(why="the sequences of a micro-batch are cut to its longest"),
        **{
            f"{section}.override_transformer_config.{name}": NoEffect(
                why="Megatron's plain kernels compute the same numbers", costs=_true
            )
            for name in _FUSED
        },
        f"{section}.override_transformer_config.moe_token_dispatcher_type": NoEffect(
            why="experts' tokens go by all-to-all: the same numbers", costs=_is("flex")
        ),
        f"{section}.override_transformer_config.attention_backend": NoEffect(
            why="attention is Megatron's own: the same numbers", costs=_is("flash", "fused")
        ),
        f"{section}.override_transformer_config.pipeline_model_parallel_layout": Refused(
            why="set num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        ),
        f"{section}.override_ddp_config.grad_reduce_in_fp32": NoEffect(
            why="gradients are summed in float32", only=_is(True), otherwise="gradients are summed in float32"
        ),
        f"{section}.use_megatron_fsdp": NoEffect(
            why="ranks hold whole layers of their stage: the same numbers, more memory (strategy=fsdp2 shards them)",
            costs=_true,
        ),
        f"{section}.seed": Refused(why="the nearest is trainer.seed"),
    }


def _of_routes(section: str, why: str) -> dict[str, Rule]:
    """Router replay of what has one pass over a batch."""
    return {
        f"{section}.mode": NoEffect(why="it is off", only=_is("disabled"), otherwise=why),
        f"{section}.record_file": NoEffect(why="it is null", only=_is(None), otherwise="experts are not kept in files"),
        f"{section}.replay_file": NoEffect(why="it is null", only=_is(None), otherwise="experts are not kept in files"),
    }


def _as_actor(section: str, why: str) -> dict[str, Rule]:
    ours = {field.name for field in fields(RefMegatronConfig)} if section == f"{_REF}.megatron" else set()
    ours |= {"override_transformer_config", "router_replay"}  # single fields of them have rules
    names = [field.name for field in fields(MegatronConfig) if field.name not in ours]
    same: dict[str, Rule] = {
        f"{section}.{name}": NoEffect(why=why, only=is_actors(name), otherwise=f"{why}; see {_MEGATRON}")
        for name in names
    }
    same |= {
        f"{section}.override_transformer_config.{name}": NoEffect(
            why=why, only=is_actors(name), otherwise=f"{why}; see {_MEGATRON}"
        )
        for name in _OF_STAGES
    }
    same |= _of_routes(f"{section}.router_replay", "only the actor has more than one pass over a batch")
    return {**same, f"{section}.*": Refused(why=f"{why}; see {_MEGATRON}")}


def _of_fsdp(section: str) -> dict[str, Rule]:
    """What every `fsdp_config` of verl has."""
    return {
        f"{section}.offload_policy": Moved(
            to=(f"{section}.param_offload", f"{section}.optimizer_offload"),
            convert=lambda value, _: True if value else None,
        ),
        f"{section}.use_orig_params": NoEffect(why="parameters keep their names and shapes in either case"),
        f"{section}.wrap_policy.*": NoEffect(why="every layer is a unit of its own: the same numbers"),
        f"{section}.mixed_precision.param_dtype": Moved(to=(f"{section}.dtype",), convert=dtype_of),
        f"{section}.mixed_precision.reduce_dtype": NoEffect(
            why="gradients are summed in float32, which is no less exact", costs=_is("bf16", "fp16", "bfloat16")
        ),
        f"{section}.mixed_precision.buffer_dtype": NoEffect(
            why="buffers keep the dtype that transformers gives them", only=_is("fp32", "float32"), otherwise="fp32"
        ),
        f"{section}.seed": NoEffect(why="the model comes from a checkpoint; trainer.seed draws what does not"),
        f"{section}.full_determinism": _off("kernels are torch's usual ones"),
        f"{section}.use_torch_compile": NoEffect(why="nothing is compiled: the same numbers, slower", costs=_true),
        f"{section}.entropy_checkpointing": NoEffect(why="recomputed never: the same numbers", costs=_true),
        f"{section}.entropy_from_logits_with_chunking": NoEffect(why="the same numbers, more memory", costs=_true),
    }


def _of_profiler(section: str) -> dict[str, Rule]:
    """Sections whose ranks are in the traces of the actor's."""
    return {f"{section}.profiler.*": NoEffect(why=f"it is in the traces of {_ACTOR}.profiler")}


def _of_ranks(section: str, fsdp: str, budget: str) -> dict[str, Rule]:
    """What verl has below actor, ref and critic alike."""
    return {
        f"{section}.ulysses_sequence_parallel_size": Moved(
            to=(f"{fsdp}.ulysses_sequence_parallel_size",), convert=shared_by(fsdp)
        ),
        f"{section}.use_torch_compile": NoEffect(why="nothing is compiled: the same numbers, slower", costs=_true),
        f"{section}.entropy_checkpointing": NoEffect(
            why="entropies are kept for the backward pass: the same numbers, more memory", costs=_true
        ),
        f"{section}.entropy_from_logits_with_chunking": NoEffect(
            why="entropies are computed per micro-batch: the same numbers, more memory", costs=_true
        ),
        f"{section}.entropy_from_logits_chunk_size": NoEffect(why="entropies are computed per micro-batch"),
        f"{section}.use_remove_padding": Moved(to=(f"{_POLICY}.model.use_remove_padding",)),
        f"{section}.use_fused_kernels": NoEffect(why="the plain kernels compute the same numbers", costs=_true),
        **_of_routes(f"{section}.router_replay", f"the nearest is {_MEGATRON}.router_replay.mode"),
        f"{section}.rollout_n": NoEffect(
            why=f"it is {_ROLLOUT}.n",
            only=lambda value, at: value == at(f"{_ROLLOUT}.n"),
            otherwise=f"set {_ROLLOUT}.n",
        ),
        f"{section}.{budget}": NoEffect(why="the token budget is per rank"),
    }


def _of_optimizer(section: str, clip: str) -> dict[str, Rule]:
    return {
        f"{section}.clip_grad": Moved(to=(clip,)),
        f"{section}.lr_decay_style": Moved(to=(f"{section}.lr_scheduler_type",), convert=scheduler),
        f"{section}.lr_decay_steps": Moved(
            to=(f"{section}.total_training_steps",), convert=lambda value, _: None if value in (None, -1) else value
        ),
        f"{section}.warmup_style": Moved(to=(f"{section}.lr_scheduler_type",), convert=scheduler),
        f"{section}.min_lr": Moved(to=(f"{section}.min_lr_ratio",), convert=on_lr(section)),
        f"{section}.optimizer": NoEffect(
            why="it is AdamW", only=_is("AdamW", "adam"), otherwise="the optimizer is AdamW"
        ),
        f"{section}.optimizer_impl": NoEffect(
            why="it is torch's", only=_is("torch.optim"), otherwise="the optimizer is torch's AdamW"
        ),
        **{
            f"{section}.override_optimizer_config.{key}": NoEffect(
                why=f"moments: {_ON_DEVICE}", costs=lambda value, _: value is True
            )
            for key in ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction")
        },
        f"{section}.override_optimizer_config.use_precision_aware_optimizer": NoEffect(
            why="master weights and moments are float32, as with its defaults"
        ),
        f"{section}.override_optimizer_config.fp8_recipe": NoEffect(
            why="it says how weights in float8 are cut among ranks, and there are none"
        ),
        f"{section}.override_optimizer_config.*": Refused(why=f"the keys of the optimizer are those of {section}"),
    }


def _of_lora(model: str, reads: bool) -> dict[str, Rule]:
    if not reads:
        return {
            f"{model}.lora.rank": _rank_0("the critic is trained whole; the policy may have LoRA"),
            f"{model}.lora_rank": _rank_0("the critic is trained whole; the policy may have LoRA"),
            f"{model}.lora_alpha": NoEffect(why="the critic is trained whole"),
            f"{model}.target_modules": NoEffect(why="the critic is trained whole"),
            f"{model}.lora.*": NoEffect(why="the critic is trained whole"),
        }
    return {
        f"{model}.lora.rank": Moved(to=(f"{model}.lora_rank",)),
        f"{model}.lora.alpha": Moved(to=(f"{model}.lora_alpha",), convert=below_lora),
        f"{model}.lora.target_modules": Moved(to=(f"{model}.target_modules",), convert=below_lora),
        f"{model}.lora.exclude_modules": NoEffect(
            why="it names none", only=adapters_alike, otherwise=f"set {model}.target_modules to what gets adapters"
        ),
        f"{model}.exclude_modules": NoEffect(
            why="it names none", only=adapters_alike, otherwise=f"set {model}.target_modules to what gets adapters"
        ),
        f"{model}.lora.lora_A_init_method": NoEffect(
            why="it is how A is initialised", only=_is("kaiming"), otherwise="A is initialised with kaiming"
        ),
        f"{model}.lora.lora_B_init_method": NoEffect(
            why="it is how B is initialised", only=_is("zero"), otherwise="B is initialised with zero"
        ),
        f"{model}.lora.fully_sharded_loras": NoEffect(why="how vllm cuts adapters: the same numbers", costs=_true),
        f"{model}.lora.dropout": NoEffect(why="it is 0", only=_is(0, 0.0), otherwise="adapters have no dropout"),
        f"{model}.lora.dtype": NoEffect(
            why="adapters have the dtypes of the layers beside them",
            only=computed_in,
            otherwise="adapters have the dtypes of fsdp_config or megatron, whose dtype is that of the computation",
        ),
    }


def _rank_0(what: str) -> NoEffect:
    return NoEffect(why="0 is no adapters", only=_is(0), otherwise=what)


def _reward_model() -> dict[str, Rule]:
    """verl 0.9 has it in `reward`, 0.7 in `reward_model`."""
    theirs, engines = "reward.reward_model", "the engine's own way; how text is sampled stands in the requests"
    same: tuple[str, ...] = (
        "name",
        "tensor_model_parallel_size",
        "dtype",
        "prompt_length",
        "response_length",
        "max_model_len",
    )
    same += ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "free_cache_engine")
    return {
        **{f"{theirs}.{key}": Moved(to=(f"{_REWARD}.{key}",)) for key in ("enable", "enable_resource_pool", "nnodes")},
        f"{theirs}.n_gpus_per_node": Moved(to=(f"{_REWARD}.n_gpus_per_node",)),
        f"{theirs}.model_path": Moved(to=(f"{_REWARD}.model.path",)),
        **{f"{theirs}.rollout.{key}": Moved(to=(f"{_REWARD}.rollout.{key}",)) for key in same},
        **{
            f"{theirs}.rollout.engine_kwargs.{name}.*": Moved(to=(f"{_REWARD}.rollout.engine_kwargs.{name}.*",))
            for name in ("vllm", "sglang")
        },
        f"{theirs}.rollout.quantization": _off("engines of the reward model compute in reward_model.rollout.dtype"),
        f"{_REWARD}.rollout.quantization": _off("engines of the reward model compute in reward_model.rollout.dtype"),
        f"{theirs}.rollout.data_parallel_size": NoEffect(why="each of them is an engine of its own"),
        f"{_REWARD}.rollout.data_parallel_size": NoEffect(why="each of them is an engine of its own"),
        f"{theirs}.rollout.*": NoEffect(why=engines),
        f"{_REWARD}.rollout.*": NoEffect(why=engines),
        f"{_REWARD}.model.*": NoEffect(why="the engine loads the reward model"),
        **{
            f"{_REWARD}.{key}": NoEffect(why="the engine decides how many responses it computes at once")
            for key in (
                "micro_batch_size",
                "micro_batch_size_per_gpu",
                "use_dynamic_bsz",
                "forward_max_token_len_per_gpu",
                "max_length",
            )
        },
        **{
            f"{_REWARD}.{key}": NoEffect(why="an inference engine computes the reward model")
            for key in ("strategy", "ulysses_sequence_parallel_size", "load_weight", "megatron.*", "profiler.*")
        },
    }


def _reward() -> dict[str, Rule]:
    """The rest of verl 0.9's section `reward`."""
    return {
        **{
            key: NoEffect(
                why="the built-in rewards run no code, and refuse sources of code by name; functions of one's own are "
                "not given it, as in verl"
            )
            for key in ("reward.sandbox_fusion.*", f"{_REWARD}.sandbox_fusion.*")
        },
        **_reward_model(),
    }


def _of_teachers(teacher: str) -> dict[str, Rule]:
    """Of every teacher, whatever its name."""
    section = f"{teacher}.inference"
    scored = "whole sequences are scored, of data.max_prompt_length + data.max_response_length tokens"
    return {
        **{f"{path}._target_": NoEffect(why="its class is not chosen by name") for path in (teacher, section)},
        f"{section}.free_cache_engine": NoEffect(why="teachers have devices of their own, and stay on them"),
        f"{section}.temperature": NoEffect(why="log-probs of teachers are at temperature 1, as verl's are"),
        f"{section}.prompt_length": NoEffect(why=scored),
        f"{section}.response_length": NoEffect(why=scored),
        f"{section}.disable_log_stats": NoEffect(why="the engine's own statistics are not printed"),
        f"{section}.skip_tokenizer_init": NoEffect(why="engines are given token ids"),
        f"{section}.limit_images": NoEffect(why="it is null", only=_is(None), otherwise="prompts are text"),
        f"{section}.pipeline_model_parallel_size": NoEffect(
            why="it is 1", only=_is(1), otherwise=f"the nearest is {section}.tensor_model_parallel_size"
        ),
        f"{section}.quantization": _off("teachers compute in inference.dtype"),
    }


RULES: dict[str, Rule] = {
    # Other places and names of what exists.
    "model_engine": Moved(to=(f"{_ACTOR}.strategy", "critic.strategy"), convert=engine_of),
    f"{_ACTOR}.model_engine": Moved(to=(f"{_ACTOR}.strategy", "critic.strategy"), convert=engine_of),
    f"{_ACTOR}.fsdp_config.strategy": Moved(to=(f"{_ACTOR}.strategy",), convert=fsdp_strategy),
    f"{_REF}.fsdp_config.strategy": NoEffect(
        why="the reference policy has the actor's engine", only=same_family, otherwise="it has the actor's engine"
    ),
    f"{_REF}.strategy": NoEffect(
        why="the reference policy has the actor's engine",
        only=same_family,
        otherwise=f"the reference policy shares the actor's ranks and engine: set {_ACTOR}.strategy",
    ),
    "rollout.nnodes": Moved(to=(f"{_ROLLOUT}.nnodes",)),
    "rollout.n_gpus_per_node": Moved(to=(f"{_ROLLOUT}.n_gpus_per_node",)),
    "rollout.n": Moved(to=(f"{_ROLLOUT}.n",)),
    "rollout.total_rollout_steps": Moved(to=("async_training.total_rollout_steps",)),
    "rollout.*": Refused(
        why=f"it belongs to trainers with machines of their own for rollouts; here it is {_ROLLOUT}.*"
    ),
    "reward.num_workers": Moved(to=(f"{_REWARD}.num_workers",)),
    "reward.reward_manager.name": Moved(to=(f"{_REWARD}.reward_manager",)),
    "reward.reward_manager.source": NoEffect(
        why="it is looked up by name", only=_is("register"), otherwise="reward managers are looked up by name"
    ),
    "reward.reward_manager.module.*": NoEffect(why="only with reward_manager.source=importlib"),
    "reward.reward_kwargs.*": Moved(to=(f"{_REWARD}.reward_kwargs.*",)),
    f"{_REWARD}.overlong_buffer.*": Moved(to=(f"{_REWARD}.reward_kwargs.overlong_buffer_cfg.*",)),
    "reward.custom_reward_function.*": Moved(to=("custom_reward_function.*",)),
    **_reward(),
    f"{_REWARD}.launch_reward_fn_async": NoEffect(why="responses are scored in processes of their own in any case"),
    f"{_REWARD}.use_reward_loop": NoEffect(why="responses are scored in processes of their own in any case"),
    "critic.model.fsdp_config.*": Moved(to=("critic.fsdp.*",)),
    "critic.fsdp_config.*": Moved(to=("critic.fsdp.*",)),
    "critic.forward_max_token_len_per_gpu": NoEffect(why="values are computed within ppo_max_token_len_per_gpu"),
    "critic.forward_micro_batch_size_per_gpu": NoEffect(why="values are computed in ppo_micro_batch_size_per_gpu"),
    "critic.forward_micro_batch_size": NoEffect(why="values are computed in ppo_micro_batch_size_per_gpu"),
    "critic.rollout_n": NoEffect(why=f"it is {_ROLLOUT}.n"),
    f"{_ACTOR}.ppo_micro_batch_size": Moved(to=(f"{_ACTOR}.ppo_micro_batch_size_per_gpu",), convert=by_ranks),
    f"{_ROLLOUT}.log_prob_micro_batch_size": Moved(
        to=(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",), convert=by_ranks
    ),
    f"{_REF}.log_prob_micro_batch_size": Moved(to=(f"{_REF}.log_prob_micro_batch_size_per_gpu",), convert=by_ranks),
    "critic.ppo_micro_batch_size": Moved(to=("critic.ppo_micro_batch_size_per_gpu",), convert=by_ranks),
    **_of_optimizer(f"{_ACTOR}.optim", f"{_ACTOR}.grad_clip"),
    **_of_optimizer("critic.optim", "critic.grad_clip"),
    **_of_lora(f"{_POLICY}.model", True),
    **_of_lora("critic.model", False),
    f"{_ROLLOUT}.multi_turn.max_user_turns": Moved(
        to=(f"{_ROLLOUT}.multi_turn.max_assistant_turns",), convert=at_most_turns
    ),
    f"{_ROLLOUT}.enable_sleep_mode": Moved(
        to=(f"{_ROLLOUT}.free_cache_engine",), convert=lambda value, _: None if value else False
    ),
    f"{_CORRECTION}.bypass_mode": Moved(
        to=(f"{_ACTOR}.use_rollout_log_probs", f"{_ROLLOUT}.calculate_log_probs"),
        convert=lambda value, _: True if value else None,
    ),
    **{f"{_MEGATRON}.override_transformer_config.{name}": Moved(to=(f"{_MEGATRON}.{name}",)) for name in _OF_STAGES},
    "trainer.profile_steps": Moved(to=("global_profiler.steps",)),
    f"{_ACTOR}.tau_pos": Moved(to=(f"{_ACTOR}.policy_loss.tau_pos",)),
    f"{_ACTOR}.tau_neg": Moved(to=(f"{_ACTOR}.policy_loss.tau_neg",)),
    f"{_POLICY}.model.override_config.model_config.*": Moved(to=(f"{_POLICY}.model.override_config.*",)),
    f"{_POLICY}.model.override_config.moe_config.freeze_moe_router": _off("the routers of experts are trained, too"),
    **{
        f"{_POLICY}.model.override_config.{name}": NoEffect(
            why="no dropout is what it would be", only=_is(0, 0.0), otherwise="nothing is dropped out of activations"
        )
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")
    },
    # Accepted: the same numbers without them.
    **_of_ranks(_ACTOR, f"{_ACTOR}.fsdp_config", "ppo_infer_max_token_len_per_gpu"),
    **_of_ranks(_REF, f"{_REF}.fsdp_config", "ppo_infer_max_token_len_per_gpu"),
    **_of_ranks("critic", "critic.fsdp", "ppo_infer_max_token_len_per_gpu"),
    f"{_ACTOR}.router_replay.mode": Moved(
        to=(f"{_MEGATRON}.router_replay.mode",), convert=lambda value, _: None if value == "disabled" else value
    ),
    f"{_MEGATRON}.router_replay.record_file": NoEffect(
        why="it is null", only=_is(None), otherwise="experts are not kept in files"
    ),
    f"{_MEGATRON}.router_replay.replay_file": NoEffect(
        why="it is null", only=_is(None), otherwise="experts are not kept in files"
    ),
    **_of_fsdp(f"{_ACTOR}.fsdp_config"),
    **_of_fsdp(f"{_REF}.fsdp_config"),
    **_of_fsdp("critic.fsdp"),
    **_of_megatron(_MEGATRON),
    **_of_megatron(f"{_REF}.megatron"),
    **_as_actor(f"{_REF}.megatron", "the reference policy is cut like the actor"),
    **_as_actor("critic.megatron", "a critic with strategy=megatron is cut like the actor"),
    **_of_megatron("critic.megatron"),
    f"{_REF}.megatron.use_dist_checkpointing": NoEffect(
        why="the reference policy begins with the actor's first weights",
        only=of_same_checkpoint,
        otherwise=f"the reference policy is read from where the actor is; see {_MEGATRON}.dist_checkpointing_path",
    ),
    "critic.megatron.use_dist_checkpointing": NoEffect(
        why="the critic is read from the Hugging Face directory critic.model.path", costs=_true
    ),
    **{
        f"{section}.megatron.dist_checkpointing_{name}": NoEffect(why=f"see {section}.megatron.use_dist_checkpointing")
        for section in (_REF, "critic")
        for name in ("path", "prefix")
    },
    **_of_profiler(_REF),
    **_of_profiler("critic"),
    f"{_ROLLOUT}.profiler.*": NoEffect(why="every rollout engine is traced, in one trace for a step"),
    f"{_ACTOR}.profiler.tool": NoEffect(
        why="it is that of global_profiler",
        only=lambda value, at: value in (None, at("global_profiler.tool")),
        otherwise="it is global_profiler.tool",
    ),
    f"{_ACTOR}.profiler.save_path": NoEffect(
        why="it is that of global_profiler",
        only=lambda value, at: value in (None, at("global_profiler.save_path")),
        otherwise="it is global_profiler.save_path",
    ),
    f"{_ACTOR}.profiler.tool_config.*": NoEffect(
        why="torch's profilers are taken with their defaults, and a step has one trace"
    ),
    "global_profiler.profile_continuous_steps": NoEffect(
        why="every step has a trace of its own; see global_profiler.steps"
    ),
    "global_profiler.global_tool_config.nsys.worker_nsight_options.*": Moved(to=("global_profiler.nsys_options.*",)),
    "global_profiler.global_tool_config.nsys.controller_nsight_options.*": NoEffect(why="the driver uses no device"),
    "global_profiler.global_tool_config.nsys.discrete": NoEffect(why="a step has one trace"),
    "global_profiler.global_tool_config.torch_memory.*": NoEffect(why="it is taken with torch's defaults"),
    "global_profiler.global_tool_config.precision_debugger.*": NoEffect(why="it is no tool here"),
    f"{_POLICY}.model.use_fused_kernels": NoEffect(why="the plain kernels compute the same numbers", costs=_true),
    f"{_POLICY}.model.fused_kernel_options.*": NoEffect(why="the plain kernels compute the same numbers"),
    f"{_POLICY}.model.use_liger": NoEffect(why="the plain kernels compute the same numbers", costs=_true),
    f"{_POLICY}.model.use_shm": NoEffect(why="the model is read from where it is: it only takes longer"),
    f"{_POLICY}.model.enable_activation_offload": NoEffect(
        why="activations stay on the device: the same numbers, more memory", costs=_true
    ),
    "critic.model.enable_activation_offload": NoEffect(
        why="activations stay on the device: the same numbers, more memory", costs=_true
    ),
    "critic.model.use_shm": NoEffect(why="the model is read from where it is: it only takes longer"),
    "critic.model.tokenizer_path": NoEffect(why="the critic reads the policy's tokens"),
    f"{_POLICY}.model.torch_dtype": NoEffect(why="the dtypes are those of fsdp_config"),
    f"{_POLICY}.ref.model.*": Refused(why="the reference policy is the model that training begins with"),
    f"{_ACTOR}.calculate_sum_pi_squared": NoEffect(
        why="it is computed for the optimal token baseline, which alone reads it, by one more pass over the batch",
        costs=_true,
    ),
    f"{_ACTOR}.checkpoint.mbridge_config.*": NoEffect(why="Hugging Face directories are written as they are"),
    f"{_ROLLOUT}.layered_summon": NoEffect(why="weights are collected shard by shard in any case"),
    f"{_ROLLOUT}.disable_log_stats": NoEffect(why="the engine's own statistics are not printed"),
    f"{_ROLLOUT}.multi_stage_wake_up": NoEffect(
        why="engines get back the memory of the weights first, and that of the cache once these are loaded"
    ),
    f"{_ROLLOUT}.skip_tokenizer_init": NoEffect(why="engines are given token ids"),
    f"{_ROLLOUT}.cudagraph_capture_sizes": Moved(to=(f"{_ROLLOUT}.engine_kwargs.vllm.cudagraph_capture_sizes",)),
    f"{_ROLLOUT}.pipeline_model_parallel_size": NoEffect(
        why="it is 1", only=_is(1), otherwise=f"the nearest is {_ROLLOUT}.tensor_model_parallel_size"
    ),
    f"{_ROLLOUT}.quantization_config_file": NoEffect(
        why="there is none", only=_is(None), otherwise=f"the one way to quantize is {_ROLLOUT}.quantization=fp8"
    ),
    f"{_ROLLOUT}.trace.*": NoEffect(
        why="samples are not traced; trainer.rollout_data_dir has every one",
        only=lambda value, at: at(f"{_ROLLOUT}.trace.backend") is None,
        otherwise="samples are not traced; trainer.rollout_data_dir has every one",
    ),
    f"{_ROLLOUT}.prometheus.enable": Moved(
        to=("trainer.metrics_port",),
        convert=scraped,
        why="Prometheus scrapes the driver, at the address that the log says, and no engines",
    ),
    f"{_ROLLOUT}.prometheus.*": NoEffect(why="no file of Prometheus's is written: tell it where the driver is"),
    f"{_ROLLOUT}.over_sample_rate": NoEffect(
        why="it is 0", only=_is(0, 0.0), otherwise="every prompt of a batch is generated to its end"
    ),
    "data.filter_overlong_prompts_workers": NoEffect(why="prompts are counted in one process: it only takes longer"),
    "data.trust_remote_code": NoEffect(
        why=f"code from a model's directory is run with {_POLICY}.model.trust_remote_code alone"
    ),
    "data.validation_shuffle": _off("validation data keeps its order"),
    "data.return_raw_input_ids": NoEffect(why="agent loops make them"),
    "data.return_full_prompt": NoEffect(why="agent loops make them"),
    "data.tokenizer": NoEffect(why="it is model.tokenizer_path", only=_is(None), otherwise="set model.tokenizer_path"),
    "trainer.use_legacy_worker_impl": NoEffect(why="there is one implementation"),
    "trainer.max_critic_ckpt_to_keep": NoEffect(
        why="a checkpoint holds actor and critic: trainer.max_actor_ckpt_to_keep counts for both"
    ),
    "trainer.ray_wait_register_center_timeout": NoEffect(why="workers need no register center"),
    "trainer.esi_redundant_time": NoEffect(why="0 is off", only=_is(0), otherwise="see trainer.save_freq"),
    f"{_CORRECTION}.rollout_rs_threshold_lower": NoEffect(
        why="it is null",
        only=_is(None),
        otherwise=f"set {_CORRECTION}.rollout_rs_threshold to both, like 0.5_2.0",
    ),
    "async_training.use_trainer_do_validate": _off("the rollout engines validate"),
    "async_training.compute_prox_log_prob": Refused(why=f"the nearest is {_ACTOR}.use_rollout_log_probs"),
    # Not here.
    "algorithm.filter_groups.max_inflight_gen_batches": NoEffect(
        why="one batch is generated at a time: the same groups, later", costs=_above_1
    ),
    **_of_teachers("distillation.teacher_models.teacher_model"),
    **_disabled(f"{_POLICY}.model.mtp", "multi-token prediction is neither trained nor used for drafts"),
    "transfer_queue.enable": NoEffect(
        why="batches go through the driver: the same numbers, more of its memory", costs=_true
    ),
    "transfer_queue.*": NoEffect(why="batches go through the driver"),
    **{
        key: rule
        for kind in ("rollout", "async_rollout")
        for key, rule in {
            f"skip.{kind}.enable": NoEffect(
                why="every step generates its responses, and none are kept for another run: it takes longer",
                costs=_true,
            ),
            f"skip.{kind}.*": NoEffect(why="every step generates its responses"),
        }.items()
    },
    "trainer.use_v1": _off("there is one trainer for each mode"),
    "trainer.v1.*": NoEffect(why="only with trainer.use_v1=true, which is not possible here"),
    f"{_ACTOR}.use_prefix_grouper": NoEffect(
        why="prompts are computed with each of their responses: the same numbers, slower", costs=_true
    ),
    **{
        f"{role}.{engine}.*": Refused(why=_OTHER_ENGINES)
        for role in (_ACTOR, _REF, "critic")
        for engine in ("veomni", "torchtitan", "mindspeed", "mlite", "automodel")
    },
    f"{_ROLLOUT}.multi_turn.*": Refused(why=f"the nearest are the other keys of {_ROLLOUT}.multi_turn"),
}


_ALONE = "distillation.distillation_loss.use_task_rewards=false: the distillation loss is the whole loss"


def _only_distils(at: Values) -> bool:
    return at("distillation.enabled") is True and at("distillation.distillation_loss.use_task_rewards") is False


SPELLINGS: dict[str, Callable[[Any, Values], Any]] = {
    f"{_ROLLOUT}.load_format": format_of_load,
    f"{_ACTOR}.use_kl_loss": lambda value, at: False if value is True and _only_distils(at) else value,
    f"{_ACTOR}.entropy_coeff": lambda value, at: 0.0 if value and _only_distils(at) else value,
    "trainer.logger": loggers,
    f"{_ROLLOUT}.profiler.enable": profiles_rollouts,
    f"{_ACTOR}.profiler.ranks": profiled_ranks,
    f"{_ACTOR}.profiler.enable": profiles,
    "global_profiler.steps": profiled_steps,
    "global_profiler.tool": profiler_tool,
    f"{_ACTOR}.kl_loss_type": kl_name,
    "algorithm.kl_penalty": kl_name,
    **{
        f"{section}.model_dtype": dtype_name
        for section in (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp", _MEGATRON)
    },
    **{f"{section}.dtype": dtype_of for section in (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp")},
    **{
        f"{section}.fsdp_size": divides_ranks
        for section in (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp")
    },
    f"{_MEGATRON}.use_dist_checkpointing": lambda value, at: (
        value if value is not True or at(f"{_MEGATRON}.dist_checkpointing_path") else False
    ),
    f"{_MEGATRON}.dist_checkpointing_path": lambda value, at: value or None,
    "critic.strategy": critic_strategy,
    f"{_POLICY}.model.lora_alpha": lambda value, at: value if at(f"{_POLICY}.model.lora_rank") or value else 16,
    f"{_ROLLOUT}.mode": lambda value, at: "async" if value == "sync" else value,
    f"{_ACTOR}.optim.lr_warmup_steps": lambda value, at: -1 if value is None else value,
    "critic.optim.lr_warmup_steps": lambda value, at: -1 if value is None else value,
    "trainer.resume_from_path": lambda value, at: value if at("trainer.resume_mode") == "resume_path" else None,
    "trainer.test_freq": off_as_minus_1,
    "trainer.save_freq": off_as_minus_1,
    f"{_CORRECTION}.rollout_rs": rejections,
    f"{_CORRECTION}.rollout_is_threshold": lambda value, at: 2.0 if value is None else value,
}
"""Keys that are here, too, and values of verl's that have other names here."""

REASONS = {
    f"{_ACTOR}.use_kl_loss": _ALONE,
    f"{_ACTOR}.entropy_coeff": _ALONE,
    f"{_ROLLOUT}.profiler.enable": "nothing is traced: rollout engines are in the steps of global_profiler.tool=torch",
    f"{_MEGATRON}.use_dist_checkpointing": f"{_MEGATRON}.dist_checkpointing_path is not set: weights are read from the "
    f"Hugging Face directory {_POLICY}.model.path",
    f"{_ACTOR}.profiler.ranks": f"{_ACTOR}.profiler.all_ranks=true has them all",
    f"{_ACTOR}.profiler.enable": "nothing is traced: no step is named in global_profiler.steps, or there is no device "
    "here that global_profiler.tool traces",
    "global_profiler.steps": f"nothing is traced: {_ACTOR}.profiler.enable=false",
    "global_profiler.tool": "nothing is traced",
    "trainer.resume_from_path": "only trainer.resume_mode=resume_path goes on from there",
}
"""Why a value of `SPELLINGS` is another one here, where that is not plain."""
