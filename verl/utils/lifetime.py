"""How processes of a run begin and end: with private files, and with the process that they belong to."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

from verl import envs
from verl.utils.files import keep_private


def end_with(pid: int) -> None:
    """Have this process killed when process `pid` is gone. Idempotent. Does nothing where there are no pidfds.

    A parent-death signal of the kernel (PR_SET_PDEATHSIG) would follow the thread that started us, which may end before
    its process does.
    """
    name = f"end-with-{pid}"
    if not hasattr(os, "pidfd_open") or any(thread.name == name for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(pid,), name=name, daemon=True).start()


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


def _watch(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(pid)], [], [])  # readable once the process has ended
    os.kill(os.getpid(), signal.SIGKILL)
