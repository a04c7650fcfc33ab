#!/usr/bin/env bash
# As grpo_gpu_1node.sh, but 4 train with Megatron, TP 2.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/grpo_gpu_1node.sh" \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    trainer.experiment_name=fully-async-1node-megatron \
    "$@"
