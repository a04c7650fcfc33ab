#!/usr/bin/env bash
# As run_qwen3_8gpu.sh, but trained with Megatron, TP 4 and DP 2.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/run_qwen3_8gpu.sh" \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.sequence_parallel=true \
    trainer.experiment_name=grpo-qwen3-8gpu-megatron \
    "$@"
