#!/usr/bin/env bash
# As the launcher of GRPO, but PPO with a critic: minutes on two cores.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/../grpo_trainer/run_builtin_cpu.sh" \
    algorithm.adv_estimator=gae \
    trainer.experiment_name=ppo-builtin-cpu \
    "$@"
