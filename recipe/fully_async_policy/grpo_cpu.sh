#!/usr/bin/env bash
# The built-in model and data on two cores; real vLLM, real process groups.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-.venv/bin/python}" -m verl.experimental.fully_async_policy.fully_async_main \
    --config-path=recipe/fully_async_policy/config --config-name=grpo_cpu \
    "$@"
