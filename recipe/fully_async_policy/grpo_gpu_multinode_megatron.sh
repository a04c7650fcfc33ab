#!/usr/bin/env bash
# As grpo_gpu_multinode.sh, but 2 nodes of 8 GPUs train with Megatron, TP 4 and PP 2.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/grpo_gpu_multinode.sh" \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    trainer.experiment_name=fully-async-multinode-megatron \
    "$@"
