#!/usr/bin/env bash
# GRPO on one node of 8 GPUs, which train (FSDP2) and generate by turns. MODEL, TRAIN and VAL are local paths.
set -euo pipefail

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN:?a parquet file}" \
    data.val_files="${VAL:?a parquet file}" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=4096 \
    actor_rollout_ref.model.path="${MODEL:?a Hugging Face directory}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    checkpoint_engine.backend=naive \
    trainer.device=cuda \
    trainer.n_gpus_per_node=8 \
    trainer.experiment_name=grpo-qwen3-8gpu \
    "$@"
