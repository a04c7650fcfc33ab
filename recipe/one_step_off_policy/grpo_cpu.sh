#!/usr/bin/env bash
# The built-in model and data on two cores; real vLLM, real process groups.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec .venv/bin/python -m verl.experimental.one_step_off_policy.main_ppo \
    checkpoint_engine.backend=gloo \
    trainer.experiment_name=one-step-off-cpu \
    "$@"
