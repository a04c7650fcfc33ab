#!/usr/bin/env bash
# DAPO on one node of 8 GPUs, with the paper's clipping, dynamic sampling and overlong shaping. MODEL, TRAIN and VAL
# are local paths.
set -euo pipefail

exec "${PYTHON:-python}" -m recipe.dapo.main_dapo \
    data.train_files="${TRAIN:?a parquet file}" \
    data.val_files="${VAL:?a parquet file}" \
    data.train_batch_size=128 \
    data.gen_batch_size=384 \
    data.max_prompt_length=2048 \
    data.max_response_length=8192 \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    actor_rollout_ref.model.path="${MODEL:?a Hugging Face directory}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=2048 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.device=cuda \
    trainer.n_gpus_per_node=8 \
    trainer.experiment_name=dapo-qwen3-8gpu \
    "$@"
