"""`python -m verl.experimental.fully_async_policy.fully_async_main [key=value ...]`: neither side waits for the other.

Keys, flags and exit codes are those of `python -m verl.trainer.main_ppo`, and `async_training.*`.
docs/fully_async_policy.md says when to use it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl.trainer.main_ppo import run, run_ppo

if TYPE_CHECKING:
    from verl.workers.config import PPOConfig

LOOP = "verl.experimental.fully_async_policy.trainer:FullyAsyncTrainer"
CONFIG_DIR = Path(__file__).parent / "config"
CONFIG_NAME = "fully_async_ppo_trainer"


def main() -> None:
    run(train, loop=LOOP, config_path=CONFIG_DIR, config_name=CONFIG_NAME)


def train(config: PPOConfig) -> None:
    """One run on this process as the driver. Raises ConfigError before anything is started."""
    from verl.experimental.fully_async_policy.trainer import FullyAsyncTrainer

    run_ppo(config, FullyAsyncTrainer)


if __name__ == "__main__":
    main()
