"""How processes of a run begin and end: with private files, and with the raylet that they belong to."""

from __future__ import annotations

from verl import envs
from verl.checkpoint_engine.support.files import keep_private
from verl.checkpoint_engine.support.lifetime import end_with


def begin_actor() -> None:
    """For the constructors of Ray actors: files that it makes are its user's alone, and it ends with its raylet.

    A Ray that somebody else has started gives its workers that one's umask.
    """
    keep_private(envs.files_for())
    end_with_raylet()


def end_with_raylet() -> None:
    """Have this process killed when its raylet is gone. Does nothing outside of Ray.

    Ray's workers only look whether process 1 has adopted them. Where somebody else adopts orphans (a user's systemd,
    some inits of containers, some terminals), they outlive a killed driver, which takes its raylet along, by a minute,
    and trainer ranks for ever: with their memory, and with the shared memory whose owner they are.
    """
    pid = envs.raylet_pid()
    if pid is not None:
        end_with(pid)
