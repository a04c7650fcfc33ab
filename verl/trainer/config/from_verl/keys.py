"""verl's keys that are no keys here: their new place, why they have no effect, or why they are refused.

One table, as data: `sections` has the parts that occur in several places, `rules` the kinds of rules, and `translation`
applies them. docs/coming-from-verl.md is generated from it.
"""

from __future__ import annotations

from verl.trainer.config.from_verl.conversions import (
    at_most_turns,
    by_ranks,
    engine_of,
    fsdp_strategy,
    is_models_patch,
    of_same_checkpoint,
    one_of,
    same_family,
    scraped,
)
from verl.trainer.config.from_verl.rules import Moved, NoEffect, Refused, Rule
from verl.trainer.config.from_verl.sections import (
    ACTOR,
    CORRECTION,
    MEGATRON,
    OF_STAGES,
    OTHER_ENGINES,
    OWN_PATCHES,
    POLICY,
    REF,
    REWARD,
    ROLLOUT,
    above_1,
    as_actor,
    is_true,
    of_fsdp,
    of_lora,
    of_megatron,
    of_mtp,
    of_optimizer,
    of_profiler,
    of_ranks,
    of_teachers,
    off,
    reward,
)

RULES: dict[str, Rule] = {
    # Other places and names of what exists.
    "model_engine": Moved(to=(f"{ACTOR}.strategy", "critic.strategy"), convert=engine_of),
    f"{ACTOR}.model_engine": Moved(to=(f"{ACTOR}.strategy", "critic.strategy"), convert=engine_of),
    f"{ACTOR}.fsdp_config.strategy": Moved(to=(f"{ACTOR}.strategy",), convert=fsdp_strategy),
    f"{ACTOR}.freeze_vision_tower": Moved(to=(f"{POLICY}.model.freeze_vision_tower",)),
    f"{REF}.fsdp_config.strategy": NoEffect(
        why="the reference policy has the actor's engine", only=same_family, otherwise="it has the actor's engine"
    ),
    f"{REF}.strategy": NoEffect(
        why="the reference policy has the actor's engine",
        only=same_family,
        otherwise=f"the reference policy shares the actor's ranks and engine: set {ACTOR}.strategy",
    ),
    "rollout.nnodes": Moved(to=(f"{ROLLOUT}.nnodes",)),
    "rollout.n_gpus_per_node": Moved(to=(f"{ROLLOUT}.n_gpus_per_node",)),
    "rollout.n": Moved(to=(f"{ROLLOUT}.n",)),
    "rollout.total_rollout_steps": Moved(to=("async_training.total_rollout_steps",)),
    "rollout.*": Refused(why=f"it belongs to trainers with machines of their own for rollouts; here it is {ROLLOUT}.*"),
    "reward.num_workers": Moved(to=(f"{REWARD}.num_workers",)),
    "reward.max_failed": Moved(to=(f"{REWARD}.max_failed",)),
    "reward.reward_manager.name": Moved(to=(f"{REWARD}.reward_manager",)),
    "reward.reward_manager.source": NoEffect(
        why="it is looked up by name", only=one_of("register"), otherwise="reward managers are looked up by name"
    ),
    "reward.reward_manager.module.*": NoEffect(why="only with reward_manager.source=importlib"),
    "reward.reward_kwargs.max_resp_len": Moved(to=(f"{REWARD}.reward_kwargs.max_resp_len",)),
    "reward.reward_kwargs.overlong_buffer_cfg.*": Moved(to=(f"{REWARD}.reward_kwargs.overlong_buffer_cfg.*",)),
    **{
        f"{section}.reward_kwargs.*": Refused(
            why="it has max_resp_len and overlong_buffer_cfg; a reward manager of your own gets the configuration, and "
            "reads its own keys in custom_reward_function.reward_kwargs"
        )
        for section in ("reward", REWARD)
    },
    f"{REWARD}.overlong_buffer.*": Moved(to=(f"{REWARD}.reward_kwargs.overlong_buffer_cfg.*",)),
    "reward.custom_reward_function.*": Moved(to=("custom_reward_function.*",)),
    **reward(),
    f"{REWARD}.launch_reward_fn_async": NoEffect(why="responses are scored in processes of their own in any case"),
    f"{REWARD}.use_reward_loop": NoEffect(why="responses are scored in processes of their own in any case"),
    "critic.model.fsdp_config.*": Moved(to=("critic.fsdp.*",)),
    "critic.fsdp_config.*": Moved(to=("critic.fsdp.*",)),
    "critic.forward_max_token_len_per_gpu": NoEffect(why="values are computed within ppo_max_token_len_per_gpu"),
    "critic.forward_micro_batch_size_per_gpu": NoEffect(why="values are computed in ppo_micro_batch_size_per_gpu"),
    "critic.forward_micro_batch_size": NoEffect(why="values are computed in ppo_micro_batch_size_per_gpu"),
    "critic.rollout_n": NoEffect(why=f"it is {ROLLOUT}.n"),
    f"{ACTOR}.ppo_micro_batch_size": Moved(to=(f"{ACTOR}.ppo_micro_batch_size_per_gpu",), convert=by_ranks),
    f"{ROLLOUT}.log_prob_micro_batch_size": Moved(
        to=(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",), convert=by_ranks
    ),
    f"{REF}.log_prob_micro_batch_size": Moved(to=(f"{REF}.log_prob_micro_batch_size_per_gpu",), convert=by_ranks),
    "critic.ppo_micro_batch_size": Moved(to=("critic.ppo_micro_batch_size_per_gpu",), convert=by_ranks),
    **of_optimizer(f"{ACTOR}.optim", f"{ACTOR}.grad_clip"),
    **of_optimizer("critic.optim", "critic.grad_clip"),
    **of_lora(f"{POLICY}.model", True),
    **of_lora("critic.model", False),
    f"{ROLLOUT}.multi_turn.max_user_turns": Moved(
        to=(f"{ROLLOUT}.multi_turn.max_assistant_turns",), convert=at_most_turns
    ),
    f"{ROLLOUT}.enable_sleep_mode": Moved(
        to=(f"{ROLLOUT}.free_cache_engine",), convert=lambda value, _: None if value else False
    ),
    f"{CORRECTION}.bypass_mode": Moved(
        to=(f"{ACTOR}.use_rollout_log_probs", f"{ROLLOUT}.calculate_log_probs"),
        convert=lambda value, _: True if value else None,
    ),
    **{f"{MEGATRON}.override_transformer_config.{name}": Moved(to=(f"{MEGATRON}.{name}",)) for name in OF_STAGES},
    f"{MEGATRON}.override_transformer_config.sequence_parallel": Moved(to=(f"{MEGATRON}.sequence_parallel",)),
    "trainer.profile_steps": Moved(to=("global_profiler.steps",)),
    f"{ACTOR}.tau_pos": Moved(to=(f"{ACTOR}.policy_loss.tau_pos",)),
    f"{ACTOR}.tau_neg": Moved(to=(f"{ACTOR}.policy_loss.tau_neg",)),
    f"{POLICY}.model.override_config.model_config.*": Moved(to=(f"{POLICY}.model.override_config.*",)),
    f"{POLICY}.model.override_config.moe_config.freeze_moe_router": off("the routers of experts are trained, too"),
    **{
        f"{POLICY}.model.override_config.{name}": Moved(
            to=(f"{POLICY}.model.override_config.{name}",),
            convert=lambda value, _: value or None,
            why=f"0 has no effect, as nothing is dropped without {POLICY}.model.dropout=keep",
        )
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")
    },
    # Accepted: the same numbers without them.
    **of_ranks(ACTOR, f"{ACTOR}.fsdp_config", "ppo_infer_max_token_len_per_gpu"),
    **of_ranks(REF, f"{REF}.fsdp_config", "ppo_infer_max_token_len_per_gpu"),
    **of_ranks("critic", "critic.fsdp", "ppo_infer_max_token_len_per_gpu"),
    f"{ACTOR}.router_replay.mode": Moved(
        to=(f"{MEGATRON}.router_replay.mode",), convert=lambda value, _: None if value == "disabled" else value
    ),
    f"{MEGATRON}.router_replay.record_file": NoEffect(
        why="it is null", only=one_of(None), otherwise="experts are not kept in files"
    ),
    f"{MEGATRON}.router_replay.replay_file": NoEffect(
        why="it is null", only=one_of(None), otherwise="experts are not kept in files"
    ),
    **of_fsdp(f"{ACTOR}.fsdp_config"),
    **of_fsdp(f"{REF}.fsdp_config"),
    **of_fsdp("critic.fsdp"),
    **of_megatron(MEGATRON),
    **of_megatron(f"{REF}.megatron"),
    **as_actor(f"{REF}.megatron", "the reference policy is cut like the actor"),
    **as_actor("critic.megatron", "a critic with strategy=megatron is cut like the actor"),
    **of_megatron("critic.megatron"),
    f"{REF}.megatron.use_dist_checkpointing": NoEffect(
        why="the reference policy begins with the actor's first weights",
        only=of_same_checkpoint,
        otherwise=f"the reference policy is read from where the actor is; see {MEGATRON}.dist_checkpointing_path",
    ),
    "critic.megatron.use_dist_checkpointing": NoEffect(
        why="the critic is read from the Hugging Face directory critic.model.path", costs=is_true
    ),
    **{
        f"{section}.megatron.dist_checkpointing_{name}": NoEffect(why=f"see {section}.megatron.use_dist_checkpointing")
        for section in (REF, "critic")
        for name in ("path", "prefix")
    },
    **of_profiler(REF),
    **of_profiler("critic"),
    f"{ROLLOUT}.profiler.*": NoEffect(why="every rollout engine is traced, in one trace for a step"),
    f"{ACTOR}.profiler.tool": NoEffect(
        why="it is that of global_profiler",
        only=lambda value, at: value in (None, at("global_profiler.tool")),
        otherwise="it is global_profiler.tool",
    ),
    f"{ACTOR}.profiler.save_path": NoEffect(
        why="it is that of global_profiler",
        only=lambda value, at: value in (None, at("global_profiler.save_path")),
        otherwise="it is global_profiler.save_path",
    ),
    f"{ACTOR}.profiler.tool_config.*": NoEffect(
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
    f"{POLICY}.model.use_fused_kernels": NoEffect(why="the plain kernels compute the same numbers", costs=is_true),
    f"{POLICY}.model.fused_kernel_options.*": NoEffect(why="the plain kernels compute the same numbers"),
    f"{POLICY}.model.use_liger": NoEffect(why="the plain kernels compute the same numbers", costs=is_true),
    f"{POLICY}.model.use_shm": NoEffect(why="the model is read from where it is: it only takes longer"),
    f"{POLICY}.model.enable_activation_offload": NoEffect(
        why="activations stay on the device: the same numbers, more memory", costs=is_true
    ),
    "critic.model.enable_activation_offload": NoEffect(
        why="activations stay on the device: the same numbers, more memory", costs=is_true
    ),
    "critic.model.use_shm": NoEffect(why="the model is read from where it is: it only takes longer"),
    "critic.model.tokenizer_path": NoEffect(why="the critic reads the policy's tokens"),
    f"{POLICY}.model.torch_dtype": NoEffect(why="the dtypes are those of fsdp_config"),
    f"{POLICY}.ref.model.*": Refused(why="the reference policy is the model that training begins with"),
    f"{ACTOR}.calculate_sum_pi_squared": NoEffect(
        why="it is computed for the optimal token baseline, which alone reads it, by one more pass over the batch",
        costs=is_true,
    ),
    f"{ACTOR}.checkpoint.strict": NoEffect(why="what is exported has every tensor of the model in any case"),
    f"{ACTOR}.checkpoint.mbridge_config.*": NoEffect(why="Hugging Face directories are written as they are"),
    f"{ROLLOUT}.layered_summon": NoEffect(why="weights are collected shard by shard in any case"),
    f"{ROLLOUT}.disable_log_stats": NoEffect(why="the engine's own statistics are not printed"),
    f"{ROLLOUT}.multi_stage_wake_up": NoEffect(
        why="engines get back the memory of the weights first, and that of the cache once these are loaded"
    ),
    f"{ROLLOUT}.skip_tokenizer_init": NoEffect(why="engines are given token ids"),
    f"{ROLLOUT}.engine_kwargs.vllm.max_model_len": Moved(to=(f"{ROLLOUT}.max_model_len",)),
    **{
        f"{ROLLOUT}.engine_kwargs.vllm.{name}": NoEffect(why=OWN_PATCHES)
        for name in ("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb")
    },
    f"{ROLLOUT}.cudagraph_capture_sizes": Moved(to=(f"{ROLLOUT}.engine_kwargs.vllm.cudagraph_capture_sizes",)),
    f"{ROLLOUT}.pipeline_model_parallel_size": NoEffect(
        why="it is 1", only=one_of(1), otherwise=f"the nearest is {ROLLOUT}.tensor_model_parallel_size"
    ),
    f"{ROLLOUT}.quantization_config_file": NoEffect(
        why="there is none", only=one_of(None), otherwise=f"the one way to quantize is {ROLLOUT}.quantization=fp8"
    ),
    f"{ROLLOUT}.trace.*": NoEffect(
        why="samples are not traced; trainer.rollout_data_dir has every one",
        only=lambda value, at: at(f"{ROLLOUT}.trace.backend") is None,
        otherwise="samples are not traced; trainer.rollout_data_dir has every one",
    ),
    f"{ROLLOUT}.prometheus.enable": Moved(
        to=("trainer.metrics_port",),
        convert=scraped,
        why="Prometheus scrapes the driver, at the address that the log says, and no engines",
    ),
    f"{ROLLOUT}.prometheus.*": NoEffect(why="no file of Prometheus's is written: tell it where the driver is"),
    f"{ROLLOUT}.over_sample_rate": NoEffect(
        why="it is 0", only=one_of(0, 0.0), otherwise="every prompt of a batch is generated to its end"
    ),
    "data.filter_overlong_prompts_workers": NoEffect(why="prompts are counted in one process: it only takes longer"),
    "data.continuous_token.enable": NoEffect(
        why="conversations keep the tokens that were generated in any case, and what the template writes between turns "
        "is appended to them"
    ),
    "data.continuous_token.model_family": NoEffect(
        why="the chat template gives the tokens between turns, for every family"
    ),
    "data.trust_remote_code": NoEffect(
        why=f"code from a model's directory is run with {POLICY}.model.trust_remote_code alone"
    ),
    "data.validation_shuffle": off("validation data keeps its order"),
    "data.return_raw_input_ids": NoEffect(why="agent loops make them"),
    "data.return_full_prompt": NoEffect(why="agent loops make them"),
    "data.tokenizer": NoEffect(
        why="it is model.tokenizer_path", only=one_of(None), otherwise="set model.tokenizer_path"
    ),
    "trainer.use_legacy_worker_impl": NoEffect(why="there is one implementation"),
    "trainer.max_critic_ckpt_to_keep": NoEffect(
        why="a checkpoint holds actor and critic: trainer.max_actor_ckpt_to_keep counts for both"
    ),
    "trainer.ray_wait_register_center_timeout": NoEffect(why="workers need no register center"),
    "trainer.esi_redundant_time": NoEffect(why="0 is off", only=one_of(0), otherwise="see trainer.save_freq"),
    f"{CORRECTION}.rollout_rs_threshold_lower": NoEffect(
        why="it is null",
        only=one_of(None),
        otherwise=f"set {CORRECTION}.rollout_rs_threshold to both, like 0.5_2.0: for *_k1 bounds of the rollout's "
        "probability over the trainer's, the inverse of an older release's ratio",
    ),
    "async_training.use_trainer_do_validate": off("the rollout engines validate"),
    "async_training.compute_prox_log_prob": Refused(why=f"the nearest is {ACTOR}.use_rollout_log_probs"),
    # Not here.
    "algorithm.filter_groups.max_inflight_gen_batches": NoEffect(
        why="one batch is generated at a time: the same groups, later", costs=above_1
    ),
    **of_teachers("distillation.teacher_models.teacher_model"),
    **of_mtp(f"{POLICY}.model.mtp"),
    **of_mtp("critic.model.mtp"),
    "transfer_queue.enable": NoEffect(
        why="batches go through the driver: the same numbers, more of its memory", costs=is_true
    ),
    "transfer_queue.*": NoEffect(why="batches go through the driver"),
    **{
        key: rule
        for kind in ("rollout", "async_rollout")
        for key, rule in {
            f"skip.{kind}.enable": NoEffect(
                why="every step generates its responses, and none are kept for another run: it takes longer",
                costs=is_true,
            ),
            f"skip.{kind}.*": NoEffect(why="every step generates its responses"),
        }.items()
    },
    "trainer.use_v1": off("there is one trainer for each mode"),
    "trainer.v1.*": NoEffect(why="only with trainer.use_v1=true, which is not possible here"),
    f"{ACTOR}.use_prefix_grouper": NoEffect(
        why="prompts are computed with each of their responses: the same numbers, slower", costs=is_true
    ),
    **{
        f"{role}.{engine}.*": Refused(why=OTHER_ENGINES)
        for role in (ACTOR, REF, "critic")
        for engine in ("veomni", "torchtitan", "mindspeed", "mlite", "automodel", "engine", "fsdp_config.turbo_config")
    },
    f"{ROLLOUT}.moe_tensor_parallel_size": NoEffect(
        why="it is 1",
        only=one_of(1, None),
        otherwise=f"it is TensorRT-LLM's: leave it out; experts are dealt out by {ROLLOUT}.expert_parallel_size",
    ),
    f"{ROLLOUT}.single_turn_response_length": Refused(
        why="data.max_response_length is of all turns together: leave it out"
    ),
    "trainer.worker_env.*": Refused(
        why="set it in ray_kwargs.ray_init.runtime_env.env_vars, which every worker of the run has"
    ),
    "data.image_patch_size": NoEffect(
        why="patches have the size that the model's own processor gives them",
        only=is_models_patch,
        otherwise="the patches of the model have another size, as its config.json says: leave it out",
        default="verl's default, and the patches of the model have another size: that of its config.json is taken",
    ),
    "data.return_multi_modal_inputs": NoEffect(why="patches are made where they are computed with, of the same files"),
    f"{ROLLOUT}.multi_turn.*": Refused(why=f"the nearest are the other keys of {ROLLOUT}.multi_turn"),
}
