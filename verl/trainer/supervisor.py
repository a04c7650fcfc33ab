"""`--supervised`: starts the driver of a run again when it dies."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from verl import envs
from verl.trainer.checkpoints import LATEST
from verl.workers.config.trainer import TrainerConfig

logger = logging.getLogger("verl")
FAILURE = 1
RESUMES = "trainer.resume_mode=auto"


class Supervisor:
    """Runs one training job as a child process, and again after it has died, as `trainer.max_restarts` says.

    A driver that a signal ended is started again, and so is one that failed (exit code 1), but not one that failed
    twice without a new checkpoint: the same error would come again. Other exit codes are final. The next driver resumes
    from the newest checkpoint that this job wrote; without one it begins as the first did.
    """

    def __init__(self, command: Sequence[str], config: TrainerConfig) -> None:
        """`config` was composed from `command`, to which overrides can be appended."""
        self._command = list(command)
        self._config = config
        self._pointer = Path(config.output_dir) / LATEST
        self._at_start = self._checkpoint()
        self._began_s = time.time()
        self._deaths: list[float] = []

    def run(self) -> int:
        """Returns the exit code of the last driver. KeyboardInterrupt ends the driver, too."""
        if self._config.save_freq < 1:
            logger.warning("--supervised without trainer.save_freq: a driver that dies begins again at the first step")
        was_stuck = False
        while True:
            before = self._checkpoint()
            code = self._driver()
            if code >= 0 and code != FAILURE:
                return code
            now = self._checkpoint()
            stuck = code == FAILURE and now == before
            again, was_stuck = stuck and was_stuck, stuck
            recent = [death for death in self._deaths if time.monotonic() - death < self._config.restart_window_s]
            what = "failed" if code == FAILURE else f"was ended by {signal.Signals(-code).name}"
            if again or len(recent) >= self._config.max_restarts:
                why = "it failed twice without a new checkpoint" if again else self._limit()
                logger.error("the driver %s; it is not started again: %s", what, why)
                return FAILURE if code < 0 else code
            self._deaths.append(time.monotonic())
            begins = "at the first step" if now is None or now == self._at_start else f"after step {now[0].strip()}"
            logger.warning("the driver %s; it is started again, %s", what, begins)

    def _driver(self) -> int:
        resumes = [] if self._checkpoint() == self._at_start else [RESUMES]
        since = {"VERL_SUPERVISED_SINCE": str(self._began_s)} if self._deaths else {}
        driver = subprocess.Popen([*self._command, *resumes], env=envs.of_a_program(since))
        try:
            return driver.wait()
        except KeyboardInterrupt:
            driver.terminate()  # it ends within seconds, whatever hangs; after a Ctrl-C it knows already
            driver.wait()
            raise

    def _checkpoint(self) -> tuple[str, int] | None:
        """What the pointer to the newest checkpoint says, and since when."""
        try:
            return self._pointer.read_text("utf-8"), self._pointer.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _limit(self) -> str:
        return (
            f"trainer.max_restarts={self._config.max_restarts} within "
            f"trainer.restart_window_s={self._config.restart_window_s:g}"
        )
