#!/usr/bin/env bash
# One node of 8 GPUs: 4 train with FSDP2, 4 generate. MODEL, TRAIN and VAL are local paths.
set -euo pipefail

exec "${PYTHON:-python}" -m verl.experimental.fully_async_policy.fully_async_main \
    --config-path="$(dirname -- "${BASH_SOURCE[0]}")/config" --config-name=grpo_gpu \
    actor_rollout_ref.model.path="${MODEL:?a Hugging Face directory}" \
    data.train_files="${TRAIN:?a parquet file}" \
    data.val_files="${VAL:?a parquet file}" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=4 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node=4 \
    trainer.experiment_name=fully-async-1node \
    "$@"
