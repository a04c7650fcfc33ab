#!/usr/bin/env bash
# GRPO with the built-in model and data on two cores: minutes.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-.venv/bin/python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    trainer.experiment_name=grpo-builtin-cpu \
    "$@"
