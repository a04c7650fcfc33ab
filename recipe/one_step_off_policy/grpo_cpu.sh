#!/usr/bin/env bash
# The built-in model and data on two cores; real vLLM, real process groups.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-.venv/bin/python}" -m verl.experimental.one_step_off_policy.main_ppo \
    --config-path=recipe/one_step_off_policy/config --config-name=grpo_cpu \
    "$@"
