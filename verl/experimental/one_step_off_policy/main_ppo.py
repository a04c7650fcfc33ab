"""`python -m verl.experimental.one_step_off_policy.main_ppo [key=value ...]`: generate while the trainer trains.

Keys, flags and exit codes are those of `python -m verl.trainer.main_ppo`. docs/one_step_off_policy.md says when to use
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl.trainer.main_ppo import run, run_ppo

if TYPE_CHECKING:
    from verl.workers.config import PPOConfig

LOOP = "verl.experimental.one_step_off_policy.trainer:OneStepOffPolicyTrainer"
CONFIG_DIR = Path(__file__).parent / "config"
CONFIG_NAME = "one_step_off_ppo_trainer"


def main() -> None:
    run(train, loop=LOOP, config_path=CONFIG_DIR, config_name=CONFIG_NAME)


def train(config: PPOConfig) -> None:
    """One run on this process as the driver. Raises ConfigError before anything is started."""
    from verl.experimental.one_step_off_policy.trainer import OneStepOffPolicyTrainer

    run_ppo(config, OneStepOffPolicyTrainer)


if __name__ == "__main__":
    main()
