#!/usr/bin/env bash
# All of DAPO on two cores, with the built-in model and data: three batches of 32 prompts at most for a step of 16.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-.venv/bin/python}" -m recipe.dapo.main_dapo \
    data.train_batch_size=16 data.gen_batch_size=32 \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=4 reward_model.overlong_buffer.penalty_factor=1.0 \
    "$@"
