"""Rules for sections that verl has in several places: below actor, ref and critic, in `reward` and `reward_model`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from verl.trainer.config.from_verl.conversions import (
    adapters_alike,
    below_lora,
    computed_in,
    dtype_of,
    is_actors,
    on_lr,
    one_of,
    scheduler,
    shared_by,
)
from verl.trainer.config.from_verl.rules import Moved, NoEffect, Refused, Rule, Values
from verl.workers.config import MegatronConfig, RefMegatronConfig

POLICY = "actor_rollout_ref"
ACTOR = f"{POLICY}.actor"
REF = f"{POLICY}.ref"
ROLLOUT = f"{POLICY}.rollout"
MEGATRON = f"{ACTOR}.megatron"
CORRECTION = "algorithm.rollout_correction"
REWARD = "reward_model"

MORE_THAN_1 = "sequences are not split over ranks, each is computed whole on its rank: the same numbers, more memory"
ON_DEVICE = "stays on its device all the time: the same numbers, more memory"
OTHER_ENGINES = "training engines are fsdp, fsdp2 and megatron"
OWN_PATCHES = "vLLM processes no pictures: it is given the trainer's patches"

OF_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
FUSED = (
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
    "use_fused_rmsnorm",
    "use_fused_rotary_pos_emb",
    "use_fused_swiglu",
    "use_naive_l2norm",
)


def above_1(value: Any, _: Values) -> bool:
    return isinstance(value, int) and value > 1


def is_true(value: Any, _: Values) -> bool:
    return value is True


def off(what: str) -> NoEffect:
    """The rule for a key that switches an unsupported feature off."""
    return NoEffect(why="it is off", only=one_of(False, None), otherwise=what)


def of_mtp(section: str) -> dict[str, Rule]:
    """Rules for multi-token prediction: drafts do not change probabilities, a detached head no other parameter."""

    def leaves_the_policy(value: Any, at: Values) -> bool:
        trains = value and at(f"{section}.enable_train")
        return not trains or at(f"{section}.detach_encoder") is True

    return {
        f"{section}.enable": NoEffect(
            why="the head that predicts more tokens is neither trained nor used for drafts: the same policy, slower",
            only=leaves_the_policy,
            otherwise="the loss of more predicted tokens, which would train the whole model, is not computed: set "
            f"{section}.detach_encoder=true, with which it trains no more than a head that is not used here, or "
            f"{section}.enable_train=false",
            costs=is_true,
        ),
        f"{section}.*": NoEffect(why=f"see {section}.enable"),
    }


def offloading(section: str) -> dict[str, Rule]:
    held = {"param_offload": "parameters", "grad_offload": "gradients", "optimizer_offload": "optimizer state"}
    return {f"{section}.{key}": NoEffect(why=f"{what}: {ON_DEVICE}", costs=is_true) for key, what in held.items()}


def of_megatron(section: str) -> dict[str, Rule]:
    """Rules for every `megatron` section of verl."""
    return {
        f"{section}.context_parallel_size": NoEffect(why=MORE_THAN_1, costs=above_1),
        f"{section}.override_transformer_config.context_parallel_algo": NoEffect(why=MORE_THAN_1),
        **offloading(section),
        f"{section}.virtual_pipeline_model_parallel_size": NoEffect(
            why="every stage is one run of layers: the same numbers, more waiting between stages", costs=above_1
        ),
        f"{section}.use_mbridge": NoEffect(why="Hugging Face directories are read and written as they are"),
        f"{section}.vanilla_mbridge": NoEffect(why="Hugging Face directories are read and written as they are"),
        f"{section}.use_remove_padding": NoEffect(why="the sequences of a micro-batch are cut to its longest"),
        **{
            f"{section}.override_transformer_config.{name}": NoEffect(
                why="Megatron's plain kernels compute the same numbers", costs=is_true
            )
            for name in FUSED
        },
        f"{section}.override_transformer_config.moe_token_dispatcher_type": NoEffect(
            why="experts' tokens go by all-to-all: the same numbers", costs=one_of("flex")
        ),
        f"{section}.override_transformer_config.attention_backend": NoEffect(
            why="attention is Megatron's own: the same numbers", costs=one_of("flash", "fused")
        ),
        f"{section}.override_transformer_config.pipeline_model_parallel_layout": Refused(
            why="set num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        ),
        f"{section}.override_ddp_config.grad_reduce_in_fp32": NoEffect(
            why="gradients are summed in float32", only=one_of(True), otherwise="gradients are summed in float32"
        ),
        f"{section}.use_megatron_fsdp": NoEffect(
            why="ranks hold whole layers of their stage: the same numbers, more memory (strategy=fsdp2 shards them)",
            costs=is_true,
        ),
        f"{section}.seed": Refused(why="the nearest is trainer.seed"),
    }


def of_router_replay(section: str, why: str) -> dict[str, Rule]:
    """Rules for router replay of a role with one pass over a batch."""
    return {
        f"{section}.mode": NoEffect(why="it is off", only=one_of("disabled"), otherwise=why),
        f"{section}.record_file": NoEffect(
            why="it is null", only=one_of(None), otherwise="experts are not kept in files"
        ),
        f"{section}.replay_file": NoEffect(
            why="it is null", only=one_of(None), otherwise="experts are not kept in files"
        ),
    }


def as_actor(section: str, why: str) -> dict[str, Rule]:
    ours = {field.name for field in fields(RefMegatronConfig)} if section == f"{REF}.megatron" else set()
    ours |= {"override_transformer_config", "router_replay"}  # single fields of them have rules
    names = [field.name for field in fields(MegatronConfig) if field.name not in ours]
    same: dict[str, Rule] = {
        f"{section}.{name}": NoEffect(why=why, only=is_actors(name), otherwise=f"{why}; see {MEGATRON}")
        for name in names
    }
    same |= {
        f"{section}.override_transformer_config.{name}": NoEffect(
            why=why, only=is_actors(name), otherwise=f"{why}; see {MEGATRON}"
        )
        for name in OF_STAGES
    }
    same |= of_router_replay(f"{section}.router_replay", "only the actor has more than one pass over a batch")
    return {**same, f"{section}.*": Refused(why=f"{why}; see {MEGATRON}")}


def of_fsdp(section: str) -> dict[str, Rule]:
    """Rules for every `fsdp_config` of verl."""
    return {
        f"{section}.offload_policy": Moved(
            to=(f"{section}.param_offload", f"{section}.optimizer_offload"),
            convert=lambda value, _: True if value else None,
        ),
        f"{section}.use_orig_params": NoEffect(why="parameters keep their names and shapes in either case"),
        f"{section}.wrap_policy.*": NoEffect(why="every layer is a unit of its own: the same numbers"),
        f"{section}.mixed_precision.param_dtype": Moved(to=(f"{section}.dtype",), convert=dtype_of),
        f"{section}.mixed_precision.reduce_dtype": NoEffect(
            why="gradients are summed in float32, which is no less exact", costs=one_of("bf16", "fp16", "bfloat16")
        ),
        f"{section}.mixed_precision.buffer_dtype": NoEffect(
            why="buffers keep the dtype that transformers gives them", only=one_of("fp32", "float32"), otherwise="fp32"
        ),
        f"{section}.seed": NoEffect(why="the model comes from a checkpoint; trainer.seed draws what does not"),
        f"{section}.full_determinism": off("set trainer.full_determinism=true, which is for the whole run"),
        f"{section}.use_torch_compile": NoEffect(why="nothing is compiled: the same numbers, slower", costs=is_true),
        f"{section}.entropy_checkpointing": NoEffect(why="recomputed never: the same numbers", costs=is_true),
        f"{section}.entropy_from_logits_with_chunking": NoEffect(why="the same numbers, more memory", costs=is_true),
    }


def of_profiler(section: str) -> dict[str, Rule]:
    """Rules for profiler sections of roles that the actor's traces include."""
    return {f"{section}.profiler.*": NoEffect(why=f"it is in the traces of {ACTOR}.profiler")}


def of_ranks(section: str, fsdp: str, budget: str) -> dict[str, Rule]:
    """Rules for the keys that verl has below actor, ref and critic alike."""
    return {
        f"{section}.ulysses_sequence_parallel_size": Moved(
            to=(f"{fsdp}.ulysses_sequence_parallel_size",), convert=shared_by(fsdp)
        ),
        f"{section}.use_torch_compile": NoEffect(why="nothing is compiled: the same numbers, slower", costs=is_true),
        f"{section}.entropy_checkpointing": NoEffect(
            why="entropies are kept for the backward pass: the same numbers, more memory", costs=is_true
        ),
        f"{section}.entropy_from_logits_with_chunking": NoEffect(
            why="entropies are computed per micro-batch: the same numbers, more memory", costs=is_true
        ),
        f"{section}.entropy_from_logits_chunk_size": NoEffect(why="entropies are computed per micro-batch"),
        f"{section}.use_remove_padding": Moved(to=(f"{POLICY}.model.use_remove_padding",)),
        f"{section}.use_fused_kernels": NoEffect(why="the plain kernels compute the same numbers", costs=is_true),
        **of_router_replay(f"{section}.router_replay", f"the nearest is {MEGATRON}.router_replay.mode"),
        f"{section}.rollout_n": NoEffect(
            why=f"it is {ROLLOUT}.n",
            only=lambda value, at: value == at(f"{ROLLOUT}.n"),
            otherwise=f"set {ROLLOUT}.n",
        ),
        f"{section}.{budget}": NoEffect(why="the token budget is per rank"),
    }


def of_optimizer(section: str, clip: str) -> dict[str, Rule]:
    return {
        f"{section}.clip_grad": Moved(to=(clip,)),
        f"{section}.lr_decay_style": Moved(to=(f"{section}.lr_scheduler_type",), convert=scheduler),
        f"{section}.lr_decay_steps": Moved(
            to=(f"{section}.total_training_steps",), convert=lambda value, _: None if value in (None, -1) else value
        ),
        f"{section}.warmup_style": Moved(to=(f"{section}.lr_scheduler_type",), convert=scheduler),
        f"{section}.min_lr_factor": Moved(to=(f"{section}.min_lr_ratio",)),
        f"{section}.min_lr": Moved(to=(f"{section}.min_lr_ratio",), convert=on_lr(section)),
        f"{section}.optimizer": NoEffect(
            why="it is AdamW", only=one_of("AdamW", "adam"), otherwise="the optimizer is AdamW"
        ),
        f"{section}.optimizer_impl": NoEffect(
            why="it is torch's", only=one_of("torch.optim"), otherwise="the optimizer is torch's AdamW"
        ),
        **{
            f"{section}.override_optimizer_config.{key}": NoEffect(why=f"moments: {ON_DEVICE}", costs=is_true)
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


def of_lora(model: str, reads: bool) -> dict[str, Rule]:
    if not reads:
        return {
            f"{model}.lora.rank": rank_0("the critic is trained whole; the policy may have LoRA"),
            f"{model}.lora_rank": rank_0("the critic is trained whole; the policy may have LoRA"),
            f"{model}.lora_alpha": NoEffect(why="the critic is trained whole"),
            f"{model}.target_modules": NoEffect(why="the critic is trained whole"),
            f"{model}.lora.*": NoEffect(why="the critic is trained whole"),
        }
    return {
        f"{model}.lora.rank": Moved(to=(f"{model}.lora_rank",)),
        f"{model}.lora.alpha": Moved(to=(f"{model}.lora_alpha",), convert=below_lora),
        f"{model}.lora.target_modules": Moved(to=(f"{model}.target_modules",), convert=below_lora),
        f"{model}.lora.exclude_modules": NoEffect(
            why="it names none that has adapters",
            only=adapters_alike,
            otherwise=f"set {model}.target_modules to what gets adapters",
        ),
        f"{model}.exclude_modules": NoEffect(
            why="it names none that has adapters",
            only=adapters_alike,
            otherwise=f"set {model}.target_modules to what gets adapters",
        ),
        f"{model}.lora.lora_A_init_method": NoEffect(
            why="it is how A is initialised", only=one_of("kaiming"), otherwise="A is initialised with kaiming"
        ),
        f"{model}.lora.lora_B_init_method": NoEffect(
            why="it is how B is initialised", only=one_of("zero"), otherwise="B is initialised with zero"
        ),
        f"{model}.lora.fully_sharded_loras": NoEffect(why="how vllm cuts adapters: the same numbers", costs=is_true),
        f"{model}.lora.dropout": NoEffect(why="it is 0", only=one_of(0, 0.0), otherwise="adapters have no dropout"),
        f"{model}.lora.dtype": NoEffect(
            why="adapters have the dtypes of the layers beside them",
            only=computed_in,
            otherwise="adapters have the dtypes of fsdp_config or megatron, whose dtype is that of the computation",
        ),
    }


def rank_0(what: str) -> NoEffect:
    return NoEffect(why="0 is no adapters", only=one_of(0), otherwise=what)


def reward_model() -> dict[str, Rule]:
    """Rules for the reward model: verl 0.9 has it in `reward`, 0.7 in `reward_model`."""
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
        **{f"{theirs}.{key}": Moved(to=(f"{REWARD}.{key}",)) for key in ("enable", "enable_resource_pool", "nnodes")},
        f"{theirs}.n_gpus_per_node": Moved(to=(f"{REWARD}.n_gpus_per_node",)),
        f"{theirs}.model_path": Moved(to=(f"{REWARD}.model.path",)),
        **{f"{theirs}.rollout.{key}": Moved(to=(f"{REWARD}.rollout.{key}",)) for key in same},
        **{
            f"{theirs}.rollout.engine_kwargs.{name}.*": Moved(to=(f"{REWARD}.rollout.engine_kwargs.{name}.*",))
            for name in ("vllm", "sglang")
        },
        f"{theirs}.rollout.quantization": off("engines of the reward model compute in reward_model.rollout.dtype"),
        f"{REWARD}.rollout.quantization": off("engines of the reward model compute in reward_model.rollout.dtype"),
        f"{theirs}.rollout.data_parallel_size": NoEffect(why="each of them is an engine of its own"),
        f"{REWARD}.rollout.data_parallel_size": NoEffect(why="each of them is an engine of its own"),
        f"{theirs}.rollout.*": NoEffect(why=engines),
        f"{REWARD}.rollout.*": NoEffect(why=engines),
        f"{REWARD}.model.*": NoEffect(why="the engine loads the reward model"),
        **{
            f"{REWARD}.{key}": NoEffect(why="the engine decides how many responses it computes at once")
            for key in (
                "micro_batch_size",
                "micro_batch_size_per_gpu",
                "use_dynamic_bsz",
                "forward_max_token_len_per_gpu",
                "max_length",
            )
        },
        **{
            f"{REWARD}.{key}": NoEffect(why="an inference engine computes the reward model")
            for key in ("strategy", "ulysses_sequence_parallel_size", "load_weight", "megatron.*", "profiler.*")
        },
    }


def reward() -> dict[str, Rule]:
    """Rules for the rest of verl 0.9's section `reward`."""
    return {
        **{
            key: NoEffect(
                why="the built-in rewards run no code, and refuse sources of code by name; functions of one's own are "
                "not given it, as in verl"
            )
            for key in ("reward.sandbox_fusion.*", f"{REWARD}.sandbox_fusion.*")
        },
        **reward_model(),
    }


def of_teachers(teacher: str) -> dict[str, Rule]:
    """Rules for every teacher."""
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
        f"{section}.limit_images": NoEffect(why="it is null", only=one_of(None), otherwise="prompts are text"),
        f"{section}.pipeline_model_parallel_size": NoEffect(
            why="it is 1", only=one_of(1), otherwise=f"the nearest is {section}.tensor_model_parallel_size"
        ),
        f"{section}.quantization": off("teachers compute in inference.dtype"),
    }
