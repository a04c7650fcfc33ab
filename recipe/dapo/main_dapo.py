"""`python -m recipe.dapo.main_dapo [key=value ...]`: DAPO (arXiv:2503.14476), in hybrid mode.

Keys, flags and exit codes are those of `python -m verl.trainer.main_ppo`; the defaults are those of
`config/dapo_trainer.yaml`. README.md beside this file has the parts of DAPO and their keys.
"""

from __future__ import annotations

from pathlib import Path

from verl.trainer.main_ppo import run, run_ppo

CONFIG_DIR = Path(__file__).parent / "config"
CONFIG_NAME = "dapo_trainer"


def main() -> None:
    run(run_ppo, config_path=CONFIG_DIR, config_name=CONFIG_NAME)


if __name__ == "__main__":
    main()
