#!/usr/bin/env bash
# Trains $MODEL, a Hugging Face directory. Arguments override settings: ./train.sh trainer.total_training_steps=5
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    actor_rollout_ref.model.path="${MODEL:-builtin:tiny-qwen2}" \
    data.train_files=data/train.parquet \
    data.val_files=data/test.parquet \
    custom_reward_function.path=reward.py \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=64 \
    data.max_prompt_length=32 \
    data.max_response_length=8 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    trainer.total_training_steps=30 \
    trainer.project_name=runs \
    trainer.experiment_name=first \
    trainer.save_freq=10 \
    trainer.test_freq=10 \
    "$@"
