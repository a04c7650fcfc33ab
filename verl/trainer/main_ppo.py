"""`python -m verl.trainer.main_ppo [key=value ...]`: reinforcement learning of a language model in hybrid mode.

Without arguments it teaches a tiny built-in model arithmetic on two CPU cores. `--help` lists every key.

Exit codes: 0, 1 (a failure: in a line if that explains it, else with its traceback), 2 (something to change on the
command line, in one line per mistake), 130 (ended by Ctrl-C or SIGTERM, within 5 s whatever hangs).
Whatever the code, no process and no shared memory of the run is left.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from verl.checkpoint_engine.support.signals import end_when_told, end_within, why_interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl.trainer.config.checking import Checked
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.workers.config import PPOConfig

FAILURE, INTERRUPTED = 1, 130
ENDS_WITHIN_S = 4.0
"""Seconds for the driver to end after Ctrl-C or SIGTERM. Then cleanup processes, which outlive it, do the rest."""
logger = logging.getLogger("verl")


HYBRID = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments`; by default this process's."""
    run(run_ppo, argv=arguments)


def run(trainer: Callable[[PPOConfig], None], *, loop: str = HYBRID, **defaults: Any) -> None:
    """Run `trainer` by the command line, and end the process as described above. `defaults` is as in `run_hydra`.

    `loop` is the "module:Class" of the trainer's loop, whose run `--check` plans.
    """
    end_when_told()
    end_within(ENDS_WITHIN_S, partial(_end_interrupted, "stopped"))
    try:
        from verl.trainer.config.cli import run_hydra  # here, since a Ctrl-C may come this early

        def adapt(config: PPOConfig) -> PPOConfig:
            if loop == HYBRID:  # without its class, which imports torch and Ray
                from verl.trainer.ppo.settled import of_whole_batches

                return of_whole_batches(config)
            return _class_of(loop).adapted(config)

        known = _known_good if loop == HYBRID else None
        run_hydra(trainer, adapt=adapt, check=partial(check_ppo, loop=loop), known=known, **defaults)
    except KeyboardInterrupt as exc:
        _end_interrupted(f"stopped{exc}")
    except RuntimeError as exc:
        from verl.trainer.fleet.ray_watch import RayLost

        if not isinstance(exc, RayLost):
            raise
        _end(FAILURE, f"error: {exc}")


def _end_interrupted(words: str) -> NoReturn:
    """Without Ray's processes calls of it may hang: then nothing raises what has become of them in time."""
    if why := why_interrupted():
        _end(FAILURE, f"error: {why}")
    _end(INTERRUPTED, words)


def _end(code: int, words: str) -> NoReturn:
    """Without the exit hooks of libraries, which would find what was interrupted half way, and Ray's wait for it."""
    try:
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    finally:  # also if nobody reads that any more
        os._exit(code)


def check_ppo(config: PPOConfig, loop: str = HYBRID, *, pictures: bool = False) -> Checked:
    """Check model and data as `run_ppo` does, and describe the run. Starts nothing. `pictures`: a built-in model stands
    in for one that sees."""
    from verl.trainer.ppo.plan import plan
    from verl.trainer.ppo.verl_names import refuse_replaced

    refuse_replaced()
    return plan(config, _class_of(loop), pictures=pictures)


def _known_good(config: PPOConfig) -> Checked | None:
    from verl.trainer.ppo.known_good import known_good
    from verl.trainer.ppo.verl_names import refuse_replaced

    refuse_replaced()
    return known_good(config)


def _class_of(loop: str) -> type[RayPPOTrainer]:
    module, _, name = loop.partition(":")
    found: type[RayPPOTrainer] = getattr(importlib.import_module(module), name)
    return found


def run_ppo(config: Any, trainer_class: type[RayPPOTrainer] | None = None, task_runner_class: Any = None) -> None:
    """One training run, on this process as the driver. Raises ConfigError before anything is started.

    `config` is a PPOConfig, or the tree of a script's own `hydra.main`. `trainer_class` has the loop; by default that
    of hybrid mode. `task_runner_class` is verl's argument; the error names its replacement.
    """
    from verl.checkpoint_engine.support.console import log_to_console
    from verl.trainer.config.record import composed_as
    from verl.trainer.fleet.starting import Starting
    from verl.trainer.fleet.warm.process import warm_process
    from verl.trainer.ppo.verl_names import refuse_replaced, refuse_runner
    from verl.workers.config import PPOConfig

    refuse_replaced()
    refuse_runner(task_runner_class)
    composed = None if isinstance(config, PPOConfig) else config
    config = _typed(config)
    log_to_console()
    logger.info(
        "training %s on %s; output in %s",
        config.actor_rollout_ref.model.path,
        config.data.train_files,
        config.trainer.output_dir,
    )
    try:
        with warm_process(config) as warm, composed_as(composed):
            starting = Starting(warm)
            with starting.during("imports"):  # while that process imports the same
                from verl.trainer.ppo.ray_trainer import RayPPOTrainer
                from verl.trainer.ppo.run import train
            train(config, trainer_class or RayPPOTrainer, starting)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; checkpoints, if any, are in {Path(config.trainer.output_dir).resolve()}") from None


def _typed(config: Any) -> PPOConfig:
    from verl.workers.config import PPOConfig

    if isinstance(config, PPOConfig):
        return config
    from verl.trainer.config.cli import usable
    from verl.trainer.config.loader import resolved_tree

    return usable(resolved_tree(config))


if __name__ == "__main__":
    main()
