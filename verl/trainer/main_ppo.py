"""`python -m verl.trainer.main_ppo [key=value ...]`: reinforcement learning of a language model in hybrid mode.

Without arguments it teaches a tiny built-in model arithmetic on two CPU cores. `--help` lists every key.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from verl.trainer.config.cli import run_hydra
from verl.workers.config import PPOConfig

logger = logging.getLogger("verl")


def main() -> None:
    run_hydra(run_ppo)


def run_ppo(config: PPOConfig) -> None:
    """One training run, on this process as the driver. Raises ConfigError before anything is started."""
    from verl.trainer.ppo.run import train

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logger.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _stop)
    try:
        train(config)
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped; checkpoints, if any, are in {Path(config.trainer.output_dir).resolve()}\n")
        raise SystemExit(130) from None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """A scheduler's SIGTERM ends a run as Ctrl-C does: in order."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
