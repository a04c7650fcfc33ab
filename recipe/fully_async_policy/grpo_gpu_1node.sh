#!/usr/bin/env bash
# One node of 8 GPUs: 4 train with FSDP2, 4 generate. MODEL, TRAIN and VAL are local paths.
set -euo pipefail

exec python -m verl.experimental.fully_async_policy.fully_async_main \
    async_training.trigger_parameter_sync_step=4 \
    async_training.staleness_threshold=0.5 \
    async_training.partial_rollout=true \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN:?a parquet file}" \
    data.val_files="${VAL:?a parquet file}" \
    data.max_prompt_length=1024 \
    data.max_response_length=8192 \
    actor_rollout_ref.model.path="${MODEL:?a Hugging Face directory}" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node=4 \
    checkpoint_engine.backend=nccl \
    trainer.device=cuda \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=4 \
    trainer.experiment_name=fully-async-1node \
    "$@"
