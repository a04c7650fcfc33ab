#!/usr/bin/env bash
# The built-in model and data on two cores, with the tool of calculator.py.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-.venv/bin/python}" -m verl.trainer.main_ppo \
    actor_rollout_ref.rollout.multi_turn.enable=true \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/custom_agent_loop/tools.yaml \
    data.max_prompt_length=512 \
    data.max_response_length=256 \
    trainer.experiment_name=tools \
    "$@"
