#!/usr/bin/env bash
# GRPO on GSM8K with one GPU, which trains and generates in turn. MODEL, TRAIN and VAL are local paths.
set -euo pipefail

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN:?a parquet file}" \
    data.val_files="${VAL:?a parquet file}" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="${MODEL:?a Hugging Face directory}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    trainer.device=cuda \
    trainer.n_gpus_per_node=1 \
    trainer.save_freq=20 \
    trainer.experiment_name=gsm8k-qwen3-1gpu \
    "$@"
