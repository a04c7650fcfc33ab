#!/usr/bin/env bash
# As ../grpo_trainer/run_qwen3_8gpu.sh, on 2 machines of 8 GPUs. Ray runs on both, and both see MODEL, TRAIN and VAL.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/../grpo_trainer/run_qwen3_8gpu.sh" \
    ray_kwargs.ray_init.address=auto \
    trainer.nnodes=2 \
    trainer.experiment_name=grpo-qwen3-multinode \
    "$@"
