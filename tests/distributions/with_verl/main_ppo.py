"""A job of PyPI verl's own `main_ppo` on CPUs: two FSDP2 ranks, two vLLM servers, weights through our adapter."""

from __future__ import annotations

from pathlib import Path

STEPS = 3
REPLICAS = 2

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.distributions.with_verl.cpu_platform",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in the process of its server starts sooner
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "verl_sync,verl_sync_for_verl",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def overrides(folder: Path, *, use_v1: bool) -> list[str]:
    """`folder` has model, data and a copy of this package, and gets the reports. `use_v1`: verl's trainer, or its older
    one."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"+{rollout}.engine_kwargs.vllm.weight_transfer_config.backend=verl_sync_for_verl",
        f"+{rollout}.checkpoint_engine.engine_kwargs.verl_sync.report_path={folder}/reports.jsonl",
        "actor_rollout_ref.model.external_lib=tests.distributions.with_verl.forgetful",
        f"trainer.use_v1={use_v1}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "+ray_kwargs.ray_init.address=local",  # and no cluster that is on this machine already
        "+ray_kwargs.ray_init.num_gpus=2",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=false",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[file]",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={folder}/tests/distributions/with_verl/reward.py",
        "reward.num_workers=1",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.optim.lr=3e-2",
        f"{actor}.use_torch_compile=false",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"{actor}.fsdp_config.dtype=float32",
        f"++{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"{rollout}.name=vllm",
        f"{rollout}.n=2",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.dtype=float32",
        f"{rollout}.load_format=auto",
        f"{rollout}.enforce_eager=true",
        f"{rollout}.free_cache_engine=false",
        f"+{rollout}.enable_sleep_mode=false",
        f"{rollout}.max_model_len=128",
        f"{rollout}.max_num_batched_tokens=512",
        f"{rollout}.max_num_seqs=16",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.calculate_log_probs=true",
        f"{rollout}.agent.num_workers=1",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={2**26}",
        f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
    ]
