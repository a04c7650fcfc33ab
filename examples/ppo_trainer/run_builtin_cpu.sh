#!/usr/bin/env bash
# PPO with a critic with the built-in model and data on two cores: minutes.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-.venv/bin/python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    trainer.experiment_name=ppo-builtin-cpu \
    "$@"
