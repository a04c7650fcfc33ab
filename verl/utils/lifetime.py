"""The start and end of a run's processes: with private files, and together with their raylet."""

from __future__ import annotations

from verl import envs
from verl.checkpoint_engine.support.files import keep_private
from verl.checkpoint_engine.support.lifetime import end_with


def begin_actor() -> None:
    """Called in the constructors of Ray actors: makes new files private, and ends the process with its raylet.

    The workers of a Ray that another user started have that user's umask.
    """
    keep_private(envs.files_for())
    end_with_raylet()


def end_with_raylet() -> None:
    """Have this process killed when its raylet ends. Does nothing outside of Ray.

    Ray's workers only check whether process 1 has adopted them. If another process adopts orphans (a user's systemd,
    some inits of containers, some terminals), they outlive a killed driver and its raylet by a minute, and trainer
    ranks for ever: with their memory, and the shared memory that they own.
    """
    pid = envs.raylet_pid()
    if pid is not None:
        end_with(pid)
