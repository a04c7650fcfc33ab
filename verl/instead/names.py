"""Names that modules of verl's have and those here lack, and what to write in their place.

Recipes import them: they are told so, where the script says it, instead of failing later or having no effect.
"""

from __future__ import annotations

RUN = "run a loop of your own with verl.trainer.main_ppo.run_ppo(config, trainer_class=...)"
DATASET = "data.custom_cls names a data set class of your own, and data.shuffle and data.seed decide the order"
THROUGHPUT = "it is verl.trainer.ppo.metric_utils.compute_throughput_metrics(batch, timings, num_ranks)"
VARIANCE = "the variance of gradients is not among the metrics"
REWARD = "it is verl.trainer.ppo.reward.compute_reward(data, manager): rewards, and what else was said"
OF_EXPERTS = (
    *("RolloutMoELoadBalanceMetricsAccumulator", "compute_moe_lb_metrics", "compute_rollout_moe_load_balance_metrics"),
    *("get_hf_config_override_kwargs", "get_metric_data_with_optional_routed_experts", "infer_moe_num_experts"),
    "infer_rollout_moe_num_experts",
)
SCORES = "process_validation_metrics(...) has best, worst and majority of n"
LIBRARIES = "the libraries that are installed are found when they are used"
SEQUENCES = "micro-batches are cut by the trainer: actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu"
SCHEDULE = "actor.optim.lr_scheduler_type and its neighbours say the schedule"
LOADING = "model.path is loaded by the trainer: model.override_config changes a Hugging Face model's settings"
PARSERS = "it is ToolParser.get_tool_parser(name, tokenizer), or multi_turn.format=name"
WORKERS = "trainer.nnodes, trainer.n_gpus_per_node and trainer.placement say who is where"
DISPATCH = "a method is registered with register(dispatch_mode=Dispatch..., execute_mode=Execute...)"
ENGINES = "docs/how-to/add-a-trainer-engine.md says how an engine is added; actor.strategy chooses one"
ROLLOUTS = "docs/how-to/add-a-rollout-engine.md says how an engine is added; rollout.name chooses one"
REWARDS = "reward_model.reward_manager chooses a manager by name, and verl.workers.reward_manager.register adds one"
PROFILES = "global_profiler.tool and actor.profiler.enable trace steps; user code makes no marks"
CONFIGS = "configurations are frozen dataclasses of verl.workers.config; verl.trainer.config.loader makes them"
LOSS = "register a loss with verl.trainer.ppo.core_algos.register_policy_loss and set policy_loss.loss_mode to its name"
ASYNC_LOOP = "run python -m verl.experimental.fully_async_policy.fully_async_main, or one_step_off_policy.main_ppo"
BACKENDS = "checkpoint_engine.backend chooses how weights travel; docs/how-to/add-a-backend.md says how one is added"
TRAJECTORY = "a loop's run gets the columns of its sample, with its index and whether it is a validation"
GROUPS = "estimators get the groups as index, of any type: numpy.unique(index, return_inverse=True) has numbers"
MEMORY = "perf/max_memory_allocated_gb and memory/* are metrics of every step"


def _same(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


OF_MEMORY = _same("GPUMemoryLogger log_gpu_memory_usage", MEMORY)
OF_TOKENIZERS = _same(
    "build_multimodal_processor_inputs get_processor_token_id normalize_token_ids",
    "tokenizers and processors are transformers' own: call them",
)
NAMES: dict[str, dict[str, str]] = {
    "verl.trainer.main_ppo": {
        "TaskRunner": f"the driver is no Ray actor and builds the run itself: {RUN}",
        "TaskRunnerV1": f"the driver is no Ray actor and builds the run itself: {RUN}",
        "create_rl_dataset": DATASET,
        "create_rl_sampler": DATASET,
    },
    "verl.trainer.ppo.ray_trainer": {
        "Role": "there are no roles to map to workers: the configuration says what trains, generates and scores",
        "ResourcePoolManager": "trainer.nnodes, trainer.n_gpus_per_node and trainer.placement say who is where",
        "compute_advantage": "register an estimator with verl.trainer.ppo.core_algos.register_adv_est and set "
        "algorithm.adv_estimator to its name",
        "apply_kl_penalty": "set algorithm.use_kl_in_reward, algorithm.kl_penalty and algorithm.kl_ctrl",
        "compute_response_mask": "batches have it as response_mask, 0 on what tools wrote",
        "compute_throughout_metrics": THROUGHPUT,
        "compute_variance_proxy_metrics": VARIANCE,
        "compute_spec_decode_metrics": "drafts of speculative decoding are not among the metrics",
        "create_rl_dataset": DATASET,
        "create_rl_sampler": DATASET,
        "extract_reward": REWARD,
        "need_reward_model": "it is reward_model.enable",
        "need_teacher_policy": "it is distillation.enabled",
    },
    "verl.trainer.ppo.metric_utils": {
        "compute_throughout_metrics": THROUGHPUT,
        "compute_variance_proxy_metrics": VARIANCE,
        **dict.fromkeys(OF_EXPERTS, "the load of experts is not among the metrics"),
        "reduce_metrics": "workers' metrics are means over ranks already",
        "bootstrap_metric": SCORES,
        "calc_maj_val": SCORES,
    },
    "verl.trainer.ppo.reward": {
        "compute_reward_async": "rewards are scored by reward_model.num_workers processes while others are generated",
        "extract_reward": REWARD,
        "resolve_reward_manager_cls": "it is verl.workers.reward_manager.get_reward_manager_cls(name)",
    },
    "verl.trainer.ppo.core_algos": {
        "compute_policy_loss": "it is compute_policy_loss_vanilla, which returns (loss, metrics)",
        "compute_rewards": "it is apply_kl_penalty, with a controller of the coefficient and any kl_penalty",
        "PolicyLossFn": "a loss is a function: register_policy_loss says which arguments it gets",
        "kl_penalty_forward": "it is kl_penalty, which has verl's gradients as well",
    },
    "verl.trainer.ppo.utils": {
        "Role": "there are no roles to map to workers: the configuration says what trains, generates and scores",
        "need_reward_model": "it is reward_model.enable",
        "need_teacher_policy": "it is distillation.enabled",
        "create_rl_dataset": DATASET,
        "create_rl_sampler": DATASET,
        "WorkerType": WORKERS,
    },
    "verl.checkpoint_engine": _same(
        "CheckpointEngineWorker ColocatedCheckpointEngine DeltaShardedCheckpointEngine HCCLCheckpointEngine "
        "KIMICheckpointEngine MooncakeCheckpointEngine NCCLCheckpointEngine NIXLCheckpointEngine",
        BACKENDS,
    ),
    "verl.checkpoint_engine.base": _same(
        "CheckpointEngineWorker ColocatedCheckpointEngine merge_weight_chunks split_weight_chunks", BACKENDS
    ),
    "verl.experimental.agent_loop": {"get_trajectory_info": TRAJECTORY},
    "verl.experimental.agent_loop.agent_loop": {
        "DEFAULT_ROUTING_CACHE_SIZE": "each sample stays on one server",
        "ToolListWrap": "a loop has its tools as self.tools",
        "get_trajectory_info": TRAJECTORY,
    },
    "verl.experimental.agent_loop.tool_agent_loop": {
        "AgentData": "verl.tools.base_tool.BaseTool is given it: the sample and its conversation",
        "AgentState": "a loop of your own writes its turns as a plain loop",
        "SPEC_DECODE_EXTRA_KEYS": "drafts of speculative decoding are not among the metrics",
    },
    "verl.experimental.agent_loop.tool_parser": _same(
        "DeepSeekV4ToolParser GLMToolParser Gemma4ToolParser KimiToolParser MiniMaxToolParser Qwen3XMLToolParser "
        "SeedToolParser",
        PARSERS,
    ),
    "verl.experimental.fully_async_policy.fully_async_main": {"FullyAsyncTaskRunner": ASYNC_LOOP},
    "verl.experimental.fully_async_policy.message_queue": {"MessageQueueClient": ASYNC_LOOP},
    "verl.experimental.one_step_off_policy.main_ppo": {"OneStepTaskRunner": ASYNC_LOOP},
    "verl.experimental.reward_loop": _same(
        "RewardLoopManager RewardLoopWorker RewardModelManager migrate_legacy_reward_impl", REWARDS
    ),
    "verl.experimental.reward_loop.reward_manager": _same(
        "DAPORewardManager GDPORewardManager NaiveRewardManager RateLimitedRewardManager RemoteRewardManager", REWARDS
    ),
    "verl.experimental.reward_loop.reward_manager.base": {"RawRewardFn": REWARDS},
    "verl.experimental.reward_loop.reward_manager.registry": {"REWARD_MANAGER": REWARDS},
    "verl.protocol": {
        **_same(
            "BatchData DataProtoConfig deserialize_single_tensor deserialize_tensordict serialize_single_tensor "
            "serialize_tensordict",
            "batches are pickled, and DataProto.save_to_disk and load_from_disk keep them in files",
        ),
        "DataProtoFuture": "a method that is registered with blocking=False returns a future",
        "all_gather_data_proto": "ranks get their parts from the worker group, and give theirs back to it",
        "collate_fn": "it is verl.utils.dataset.rl_dataset.collate_fn, or DataProto.concat for batches",
        **_same("fold_batch_dim unfold_batch_dim", "DataProto.unfold_column_chunks cuts columns into samples"),
        **_same("union_numpy_dict union_tensor_dict", "it is DataProto.union"),
    },
    "verl.single_controller.base.decorator": _same(
        "DISPATCH_MODE_FN_REGISTRY MAGIC_ATTR collect_all_to_all collect_dp_compute collect_dp_compute_data_proto "
        "collect_lazy_compute_data_proto collect_nd_compute collect_nd_compute_dataproto dispatch_all_to_all "
        "dispatch_dp_compute dispatch_dp_compute_data_proto dispatch_dp_compute_data_proto_with_func "
        "dispatch_lazy_compute_data_proto dispatch_nd_compute dispatch_nd_compute_dataproto dispatch_one_to_all "
        "dummy_direct_rollout_call get_predefined_dispatch_fn get_predefined_execute_fn init_predefined_dispatch_mode "
        "init_predefined_execute_mode make_nd_compute_dataproto_dispatch_fn register_dispatch_mode "
        "update_dispatch_mode",
        DISPATCH,
    ),
    "verl.single_controller.base.worker": _same(
        "DistGlobalInfo DistRankInfo WorkerHelper", "a Worker has rank, world_size, master_addr and master_port"
    ),
    "verl.single_controller.base.worker_group": {
        "check_workers_alive": "a call of a worker group that died raises, and says which rank"
    },
    "verl.single_controller.ray": _same(
        "ResourcePoolManager SubRayResourcePool create_colocated_worker_cls_fused", WORKERS
    ),
    "verl.single_controller.ray.base": _same(
        "FusedWorkerCLSName ResourcePoolManager SubRayResourcePool create_colocated_worker_cls_fused "
        "create_colocated_worker_raw_cls extract_pg_from_exist func_generator get_master_addr_port get_random_string "
        "merge_resource_pool sort_placement_group_by_node_ip split_resource_pool",
        WORKERS,
    ),
    "verl.trainer.config.algorithm": {"AlgoConfig": "it is AlgorithmConfig of verl.workers.config.algorithm"},
    "verl.utils": {
        **OF_TOKENIZERS,
        **_same("as_torch_index group_mean_std", GROUPS),
        **_same("omega_conf_to_dataclass validate_config", CONFIGS),
    },
    "verl.utils.config": _same("omega_conf_to_dataclass update_dict_with_config validate_config", CONFIGS),
    "verl.utils.dataset": {"RMDataset": "reward models are not trained here: name one with reward_model.model.path"},
    "verl.utils.dataset.rl_dataset": {"get_dataset_class": DATASET},
    "verl.utils.device": _same(
        "AscendHardwareVersion auto_set_device check_ipc_version_support get_device_capability get_npu_versions "
        "get_resource_name get_vendor get_visible_devices_keyword is_device_available is_support_ipc "
        "is_torch_npu_available manual_seed manual_seed_all set_expandable_segments",
        "trainer.device says what is used; get_torch_device() is torch's module for it",
    ),
    "verl.utils.fs": _same(
        "copy_to_shm get_local_temp_path md5_encode verify_copy", "files are read from where they are: name local paths"
    ),
    "verl.utils.import_utils": {
        **_same(
            "is_megatron_core_available is_msprobe_available is_nvtx_available is_sglang_available is_trl_available "
            "is_vllm_available",
            "importlib.util.find_spec(package) says it",
        ),
        **_same(
            "FILE_PATH_PREFIX PKG_PATH_PREFIX load_module load_class_from_fqn", "it is load_extern_object(path, name)"
        ),
        "import_external_libs": "model.external_lib names what is imported before a run",
        "deprecated": "it is warnings.warn(..., DeprecationWarning)",
        "resolve_config_path": "--config-path and --config-name name configurations",
    },
    "verl.utils.metric": _same("AggregationType Metric", "workers' metrics are means over ranks already"),
    "verl.utils.metric.utils": _same(
        "AggregationType Metric Numeric NumericType", "workers' metrics are means over ranks already"
    ),
    "verl.utils.debug": OF_MEMORY,
    "verl.utils.debug.performance": OF_MEMORY,
    "verl.utils.profiler.performance": {
        **OF_MEMORY,
        **_same(
            "gather_timing log_print reduce_timing topk_reduce_ratio_min_max", "timing_s/* are metrics of every step"
        ),
    },
    "verl.utils.tokenizer.tokenizer": {
        **OF_TOKENIZERS,
        "set_pad_token_id": "hf_tokenizer(path) sets it, where there is none",
    },
    "verl.utils.py_functional": {
        **_same("DynamicEnum DynamicEnumMeta NestedNamespace", "enum.Enum and types.SimpleNamespace do it"),
        "convert_nested_value_to_list_recursive": "numpy.ndarray.tolist and torch.Tensor.tolist do it",
        "timeout_limit": "a process that can be killed does it: rewards have verl.utils.reward_score.pool",
    },
    "verl.utils.model": _same(
        "AutoModelForImageTextToText AutoModelForVision2Seq CausalLMOutputForPPO LambdaLayer check_exclude_modules "
        "check_target_modules convert_weight_keys create_huggingface_actor create_huggingface_critic "
        "create_random_mask extract_multi_modal_inputs get_generation_config get_hf_auto_model_class get_hf_model_path "
        "get_huggingface_actor_config get_lora_rank_from_adapter get_model_size get_parallel_gptmodel_from_config "
        "get_parallel_model_from_config load_mcore_dist_weights load_megatron_gptmodel_weights "
        "load_megatron_model_weights load_valuehead_model normalize_model_name normalize_pp_vpp_params "
        "pad_packed_inputs patch_valuehead_model print_model_size squeeze update_model_config",
        LOADING,
    ),
    "verl.utils.profiler": {
        **_same(
            "DistProfiler DistProfilerExtension ProfilerConfig build_rollout_dist_profiler "
            "build_sglang_profiler_args build_vllm_profiler_args is_nvtx_available mark_annotate mark_end_range "
            "mark_start_range relocate_rollout_traces rollout_profiler_global_ranks rollout_trace_dir "
            "rollout_trace_local_rank",
            PROFILES,
        ),
        **OF_MEMORY,
        "is_npu_available": "it is verl.utils.device.is_npu_available",
    },
    "verl.utils.reward_score": {"get_default_compute_score": "it is default_compute_score"},
    "verl.utils.reward_score.math_dapo": _same(
        "REMOVED_EXPRESSIONS SUBSTITUTIONS is_correct_strict_box verify",
        "compute_score(solution_str, ground_truth, strict_box_verify=...) judges both ways",
    ),
    "verl.utils.reward_score.math_reward": _same(
        "fix_a_slash_b fix_fracs fix_sqrt remove_right_units", "it is a part of strip_string"
    ),
    "verl.utils.reward_score.math_verify": {"TimeoutException": "an answer that takes too long is worth 0"},
    "verl.utils.rollout_trace": _same(
        "RolloutTraceConfig rollout_trace_attr",
        "samples are not traced: trainer.rollout_data_dir has every one",
    ),
    "verl.utils.seqlen_balancing": {
        **_same("prepare_dynamic_batch rearrange_micro_batches restore_dynamic_batch", SEQUENCES),
        **_same(
            "calculate_workload get_group_balanced_partitions greedy_partition karmarkar_karp",
            "it is get_seqlen_balanced_partitions(lengths, k, equal_size)",
        ),
    },
    "verl.utils.tokenizer": OF_TOKENIZERS,
    "verl.utils.torch_functional": {
        **_same(
            "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE NPU_CROSS_ENTROPY_LOSS_AVAILABLE log_probs_from_logits_all_rmpad "
            "log_probs_from_logits_response log_probs_from_logits_response_rmpad logprobs_from_logits_flash_attn "
            "logprobs_from_logits_naive logprobs_from_logits_torch_npu logprobs_from_logits_v2",
            "it is logprobs_from_logits(logits, labels), on any device",
        ),
        "calculate_sum_pi_squared_from_logits": "it is computed where an estimator needs it",
        "entropy_from_logits_with_chunking": "it is entropy_from_logits, which works in chunks",
        **_same(
            "get_constant_schedule_with_warmup get_cosine_schedule_with_warmup get_wsd_schedule_with_warmup", SCHEDULE
        ),
        **_same(
            "allgather_dict_into_dict allgather_dict_tensors broadcast_dict_tensor distributed_masked_mean "
            "distributed_mean_max_min_std",
            "ranks get their parts from the worker group, and torch.distributed adds up",
        ),
        **_same("check_device_is_available use_original_torch_compile", "torch itself says it"),
        "compute_grad_norm": "it is the metric actor/grad_norm",
        **_same(
            "expand_as_nested get_unpad_data prepare_decoder_attention_mask remove_pad_token "
            "split_dict_tensor_into_batches",
            "engines pack and unpack sequences: model.use_remove_padding",
        ),
        **_same(
            "post_process_logits tokenize_and_postprocess_data",
            "agent loops make prompts from messages, and DataProto holds them",
        ),
    },
    "verl.utils.tracking": {
        **_same(
            "ClearMLLogger FileLogger MLFLOW_MAX_ATTEMPTS MLFLOW_SLEEP_SECONDS RLInsightLogger",
            "trainer.logger names the services, and Tracking has them",
        ),
        **_same(
            "DapoFilteredRewardTableLogger ValidationGenerationsLogger",
            "trainer.log_val_generations shows samples, and trainer.validation_data_dir keeps all of them",
        ),
    },
    "verl.workers.critic": _same("BasePPOCritic DataParallelPPOCritic MegatronPPOCritic", ENGINES),
    "verl.workers.config.actor": _same(
        "FSDPActorConfig McoreActorConfig RouterReplayConfig TorchTitanActorConfig VeOmniActorConfig",
        "it is ActorConfig, for every engine",
    ),
    "verl.workers.config.critic": _same(
        "FSDPCriticConfig FSDPCriticModelCfg McoreCriticConfig TorchTitanCriticConfig VeOmniCriticConfig",
        "it is CriticConfig, for every engine",
    ),
    "verl.workers.config.distillation": {"DistillationTeacherModelConfig": "it is TeacherConfig"},
    "verl.workers.config.model": {"MtpConfig": "more tokens than one are neither predicted nor trained"},
    "verl.workers.config.rollout": {
        "AgentLoopConfig": "it is AgentConfig",
        **_same("CheckpointEngineConfig", "it is the section checkpoint_engine"),
        **_same("CustomAsyncServerConfig PrometheusConfig ServerConfig TraceConfig", CONFIGS),
    },
    "verl.workers.engine": _same(
        "AutomodelEngine AutomodelEngineWithLMHead BaseEngine EngineRegistry FSDPEngine FSDPEngineWithLMHead "
        "FSDPTurboEngineWithLMHead MegatronEngine MegatronEngineWithLMHead MegatronEngineWithValueHead "
        "MindspeedEngineWithLMHead MindspeedEngineWithValueHead TorchTitanEngine TorchTitanEngineWithLMHead "
        "VeOmniEngine VeOmniEngineWithLMHead",
        ENGINES,
    ),
    "verl.workers.engine.base": _same("BaseEngine BaseEngineCtx EngineRegistry", ENGINES),
    "verl.workers.engine.fsdp": _same("FSDPEngine FSDPEngineWithLMHead FSDPTurboEngineWithLMHead", ENGINES),
    "verl.workers.engine.megatron": _same(
        "MegatronEngine MegatronEngineWithLMHead MegatronEngineWithValueHead is_cuda_available", ENGINES
    ),
    "verl.workers.fsdp_workers": _same(
        "AsyncActorRolloutRefWorker CriticWorker RewardModelWorker create_device_mesh get_sharding_strategy",
        ENGINES,
    ),
    "verl.workers.reward_manager": _same(
        "BatchRewardManager DAPORewardManager PrimeRewardManager RateLimitedRewardManager", REWARDS
    ),
    "verl.workers.reward_manager.abstract": {"RawRewardFn": REWARDS},
    "verl.workers.reward_manager.registry": {"REWARD_MANAGER_REGISTRY": REWARDS},
    "verl.workers.rollout": _same("BaseRollout HFRollout NaiveRollout get_rollout_class", ROLLOUTS),
    "verl.workers.rollout.base": _same("BaseRollout get_rollout_class", ROLLOUTS),
    "verl.workers.rollout.replica": {
        "CONTROL_METHOD_CONCURRENCY": ROLLOUTS,
        "get_rollout_replica_class": "it is verl.workers.rollout.registry.RolloutReplicaRegistry",
    },
}
TIMERS = _same("marked_timer simple_timer", "verl.utils.profiler")
ELSEWHERE: dict[str, dict[str, str]] = {
    "verl.trainer.ppo.ray_trainer": {
        **dict.fromkeys(("AdvantageEstimator", "agg_loss"), "verl.trainer.ppo.core_algos"),
        **dict.fromkeys(("need_critic", "need_reference_policy"), "verl.trainer.ppo.utils"),
        **dict.fromkeys(
            ("compute_data_metrics", "compute_timing_metrics", "process_validation_metrics"),
            "verl.trainer.ppo.metric_utils",
        ),
    },
    "verl.trainer.ppo.utils": {"AdvantageEstimator": "verl.trainer.ppo.core_algos"},
    "verl.utils.debug": TIMERS,
    "verl.utils.debug.performance": TIMERS,
    "verl.utils.profiler.performance": TIMERS,
    "verl.utils.torch_functional": _same(
        "clip_by_value gather_from_labels get_response_mask pad_2d_list_to_length pad_sequence_to_length "
        "postprocess_data",
        "verl.utils.sequences",
    ),
    "verl.utils.model": {"compute_position_id_with_mask": "verl.utils.sequences"},
    "verl.trainer.config.algorithm": _same(
        "FilterGroupsConfig KLControlConfig RolloutCorrectionConfig", "verl.workers.config.algorithm"
    ),
    "verl.utils.metric.utils": {"reduce_metrics": "verl.utils.metric"},
    "verl.utils.tokenizer.tokenizer": _same("hf_processor hf_tokenizer", "verl.utils.tokenizer"),
    "verl.workers.rollout.replica": {"RolloutReplicaRegistry": "verl.workers.rollout.registry"},
}
"""By module of verl's, with or without one of ours: names that are in another module here."""
