#!/usr/bin/env bash
# The built-in model and data on two cores; real vLLM, real process groups.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec .venv/bin/python -m verl.experimental.fully_async_policy.fully_async_main \
    checkpoint_engine.backend=gloo \
    async_training.trigger_parameter_sync_step=2 \
    async_training.staleness_threshold=0.5 \
    trainer.experiment_name=fully-async-cpu \
    "$@"
