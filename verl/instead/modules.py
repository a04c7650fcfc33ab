"""Modules of verl's, of 0.9 and of releases since 0.4, that are not here: what to write instead.

A module that is not listed gets the text of its nearest listed parent.
"""

from __future__ import annotations

from verl.instead.names import (
    ASYNC_LOOP,
    BACKENDS,
    CONFIGS,
    DATASET,
    ENGINES,
    GROUPS,
    LOADING,
    MEMORY,
    PROFILES,
    REWARDS,
    ROLLOUTS,
    RUN,
    WORKERS,
)

CHECKPOINTS = "the run keeps checkpoints: trainer.save_freq, trainer.resume_mode and actor.checkpoint.save_contents"
EXPORT = "actor.checkpoint.save_contents=[model,optimizer,extra,hf_model] keeps a Hugging Face directory as well"
MEGATRON = "actor.strategy=megatron cuts the model as actor.megatron.* says (docs/megatron.md)"
SUPERVISED = "fine-tuning on given answers is not here: train the model elsewhere, and name it with model.path"
TOOLS = "multi_turn.tool_config_path names tools: classes derived from verl.tools.base_tool.BaseTool"
QUANTIZED = "rollout.quantization=fp8 is the one way to quantize"
DEVICES = "trainer.device says what is used; verl.utils.device asks for it"
SERVERS = "a loop's server_manager.generate(...) asks the engines (docs/how-to/add-an-agent-loop.md)"
PROCESSES = "worker groups set up their processes: verl.single_controller"
SCORES = "data.reward_fn_key chooses a rule of verl.utils.reward_score, and custom_reward_function.path one of your own"
CODE = f"answers that are programs are not run here: {SCORES}"
CORRECTION = "algorithm.rollout_correction has its options; the weights are verl.trainer.ppo.rollout_correction"
TEACHERS = "distillation.teacher_models names teachers (docs/distillation.md)"
TEMPLATES = "a loop's rendered(messages) applies the chat template, and reply_tokens(...) what stands between turns"
ULYSSES = "actor.fsdp_config.ulysses_sequence_parallel_size makes ranks share sequences"
OF_BATCHES = "batches are verl.DataProto, whose to_tensordict() and from_tensordict(...) convert them"
PICTURES = "data.image_key names a column of pictures, which the model's own processor reads"
NORMAL_LOGS = "Python's logging does it; a run logs on the driver"

MODULES: dict[str, str] = {
    "verl.base_config": CONFIGS,
    **dict.fromkeys(
        (
            *("verl.checkpoint_engine.delta_checkpoint_engine", "verl.checkpoint_engine.delta_sync"),
            *("verl.checkpoint_engine.hccl_checkpoint_engine", "verl.checkpoint_engine.kimi_checkpoint_engine"),
            *("verl.checkpoint_engine.mooncake_checkpoint_engine", "verl.checkpoint_engine.nccl_checkpoint_engine"),
            *("verl.checkpoint_engine.nixl_checkpoint_engine",),
        ),
        BACKENDS,
    ),
    "verl.experimental.agent_loop.utils": TEMPLATES,
    "verl.experimental.dataset": DATASET,
    "verl.experimental.dynamic_dataset": DATASET,
    "verl.experimental.fully_async_policy": ASYNC_LOOP,
    "verl.experimental.one_step_off_policy": ASYNC_LOOP,
    "verl.experimental.reward": REWARDS,
    "verl.experimental.reward_loop": REWARDS,
    "verl.experimental.separation": ASYNC_LOOP,
    "verl.experimental.teacher_loop": TEACHERS,
    "verl.experimental.transfer_queue": OF_BATCHES,
    "verl.experimental.vla": "policies of robots are not trained here",
    "verl.interactions": "multi_turn.interaction_config_path names classes that derive from BaseInteraction",
    "verl.model_merger": EXPORT,
    "verl.models": LOADING,
    "verl.plugin": DEVICES,
    "verl.third_party": "vLLM, SGLang and torch are imported as they are installed",
    "verl.tools": TOOLS,
    **dict.fromkeys(("verl.trainer.config.algorithm", "verl.trainer.config.config"), CONFIGS),
    "verl.trainer.constants_ppo": "ray_kwargs.ray_init.runtime_env.env_vars has what every process gets; "
    "verl.trainer.main_ppo.run_ppo(config) starts Ray with it",
    "verl.trainer.distillation": TEACHERS,
    **dict.fromkeys(
        ("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray"), SUPERVISED
    ),
    **dict.fromkeys(
        ("verl.trainer.main_eval", "verl.trainer.main_generation", "verl.trainer.main_generation_server"),
        "python -m verl.trainer.main_ppo trainer.val_only=true trainer.validation_data_dir=... generates and scores "
        "data.val_files",
    ),
    "verl.trainer.main_ppo_v0": RUN,
    "verl.trainer.ppo.checkpoint_callback": CHECKPOINTS,
    "verl.trainer.ppo.padding_utils": "verl.protocol has pad_dataproto_to_divisor and unpad_dataproto",
    "verl.trainer.ppo.prefix_grouper_utils": "prompts are computed with each of their responses",
    **dict.fromkeys(("verl.trainer.ppo.mismatch_helper", "verl.trainer.ppo.rollout_corr_helper"), CORRECTION),
    "verl.trainer.ppo.v1": RUN,
    "verl.trainer.runtime_env": "ray_kwargs.ray_init.runtime_env is the run's",
    "verl.utils.activation_offload": "activations stay on the device: model.enable_gradient_checkpointing saves memory",
    "verl.utils.attention_utils": "engines pack and unpack sequences: model.use_remove_padding",
    "verl.utils.checkpoint": CHECKPOINTS,
    **dict.fromkeys(
        (
            *("verl.utils.dataset.dataset_utils", "verl.utils.dataset.multiturn_sft_dataset"),
            *("verl.utils.dataset.sft_dataset", "verl.utils.dataset.rm_dataset"),
        ),
        SUPERVISED,
    ),
    "verl.utils.dataset.vision_utils": PICTURES,
    "verl.utils.debug.metrics": "training/rollout_probs_diff_* are metrics of every step",
    "verl.utils.debug.trajectory_tracker": "trainer.rollout_data_dir has every sample",
    "verl.utils.distributed": PROCESSES,
    "verl.utils.dynamic_cp_scheduler": MEGATRON,
    "verl.utils.experimental": "it is verl.utils.torch_functional.logprobs_from_logits, which works in chunks",
    "verl.utils.flops_counter": "perf/mfu/actor is a metric of every step",
    "verl.utils.fp8_utils": QUANTIZED,
    "verl.utils.fsdp_utils": "actor.strategy=fsdp or fsdp2 shards the model as actor.fsdp_config.* says",
    "verl.utils.groupwise": GROUPS,
    "verl.utils.hdfs_io": "paths are local: shutil and pathlib do it",
    "verl.utils.kernel": "the plain kernels compute the same numbers",
    **dict.fromkeys(("verl.utils.logger", "verl.utils.logging_utils"), NORMAL_LOGS),
    **dict.fromkeys(("verl.utils.megatron", "verl.utils.megatron_peft_utils", "verl.utils.megatron_utils"), MEGATRON),
    "verl.utils.memory_buffer": MEMORY,
    "verl.utils.memory_utils": MEMORY,
    "verl.utils.modelopt": QUANTIZED,
    **dict.fromkeys(("verl.utils.net_utils", "verl.utils.rendezvous"), PROCESSES),
    "verl.utils.npu_flash_attn_utils": "engines pack and unpack sequences: model.use_remove_padding",
    "verl.utils.profiler": PROFILES,
    "verl.utils.qat": QUANTIZED,
    "verl.utils.ray_utils": "asyncio and ray do it themselves",
    **dict.fromkeys(
        (
            *("verl.utils.reward_score.math", "verl.utils.reward_score.math_batch"),
            *("verl.utils.reward_score.prime_math", "verl.utils.reward_score.rlla"),
            *("verl.utils.reward_score.search_r1_like_qa_em",),
        ),
        SCORES,
    ),
    **dict.fromkeys(("verl.utils.reward_score.prime_code", "verl.utils.reward_score.sandbox_fusion"), CODE),
    "verl.utils.rollout_skip": "every step generates its responses",
    **dict.fromkeys(("verl.utils.sglang", "verl.utils.trtllm", "verl.utils.vllm", "verl.utils.vllm_utils"), ROLLOUTS),
    "verl.utils.skip": "every step generates its responses",
    "verl.utils.tensordict_utils": OF_BATCHES,
    "verl.utils.tokenizer": TEMPLATES,
    "verl.utils.torch_dtypes": "actor.fsdp_config.model_dtype and dtype have torch's names",
    "verl.utils.transferqueue_utils": OF_BATCHES,
    "verl.utils.transformers_compat": LOADING,
    "verl.utils.ulysses": ULYSSES,
    "verl.utils.veomni": ENGINES,
    "verl.workers.actor": ENGINES,
    "verl.workers.config": CONFIGS,
    "verl.workers.critic": "critic.* is the critic's configuration; verl.workers.critic has its worker",
    "verl.workers.engine": ENGINES,
    **dict.fromkeys(
        ("verl.workers.engine_workers", "verl.workers.engine_workers_tinker", "verl.workers.megatron_workers"), WORKERS
    ),
    "verl.workers.reward_manager": REWARDS,
    "verl.workers.reward_model": "reward_model.enable and reward_model.model.path start one (docs/rewards.md)",
    "verl.workers.roles": WORKERS,
    "verl.workers.rollout": ROLLOUTS,
    "verl.workers.rollout.async_server": SERVERS,
    "verl.workers.rollout.chat_scheduler": SERVERS,
    "verl.workers.rollout.llm_server": SERVERS,
    "verl.workers.rollout.router": SERVERS,
    "verl.workers.rollout.schemas": "verl.tools.schemas has what tools are shown and say",
    "verl.workers.sharding_manager": "weights go to the engines by checkpoint_engine.*",
    "verl.workers.utils": "losses are registered with verl.trainer.ppo.core_algos.register_policy_loss",
}


def instead_of(module: str) -> str | None:
    """The text for a module of verl; None for any other module."""
    while module:
        if module in MODULES:
            return MODULES[module]
        module = module.rpartition(".")[0]
    return None
