#!/usr/bin/env bash
# As ../gsm8k/run_qwen3_1gpu.sh, but trains adapters of rank 32; a sync sends these alone.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/../gsm8k/run_qwen3_1gpu.sh" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.model.lora.merge=false \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    trainer.experiment_name=gsm8k-qwen3-1gpu-lora \
    "$@"
