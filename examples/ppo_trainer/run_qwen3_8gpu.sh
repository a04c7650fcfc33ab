#!/usr/bin/env bash
# As the launcher of GRPO, but PPO with a critic: one response to each of more prompts.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/../grpo_trainer/run_qwen3_8gpu.sh" \
    algorithm.adv_estimator=gae \
    data.train_batch_size=1024 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.rollout.n=1 \
    critic.optim.lr=1e-5 \
    trainer.experiment_name=ppo-qwen3-8gpu \
    "$@"
