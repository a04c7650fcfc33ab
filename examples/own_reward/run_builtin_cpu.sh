#!/usr/bin/env bash
# The built-in model and data on two cores, scored by examples/custom_reward.py.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-.venv/bin/python}" -m verl.trainer.main_ppo \
    custom_reward_function.path=examples/custom_reward.py \
    +custom_reward_function.reward_kwargs.partial_credit=0.2 \
    trainer.experiment_name=own-reward \
    "$@"
