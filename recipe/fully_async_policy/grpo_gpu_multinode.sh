#!/usr/bin/env bash
# 2 nodes of 8 GPUs train with FSDP2, 2 generate. Ray runs on all of them, and all see MODEL, TRAIN and VAL.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/grpo_gpu_1node.sh" \
    ray_kwargs.ray_init.address=auto \
    trainer.nnodes=2 \
    trainer.n_gpus_per_node=8 \
    actor_rollout_ref.rollout.nnodes=2 \
    actor_rollout_ref.rollout.n_gpus_per_node=8 \
    trainer.experiment_name=fully-async-4nodes \
    "$@"
