#!/usr/bin/env bash
# A Qwen3 with experts on 8 GPUs: Megatron with TP 2 and EP 4 trains, vLLM with TP 4 generates.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/../grpo_trainer/run_qwen3_8gpu.sh" \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    actor_rollout_ref.actor.megatron.sequence_parallel=true \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    trainer.experiment_name=grpo-qwen3-moe-8gpu-megatron \
    "$@"
