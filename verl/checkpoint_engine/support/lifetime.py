"""End a process together with another one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading

import psutil

KILLED_WITHIN_S = 5.0


def end_with(pid: int) -> None:
    """Kill this process when process `pid` is gone. Idempotent. Does nothing on kernels without pidfds.

    The kernel's parent-death signal (PR_SET_PDEATHSIG) depends on the thread that started this process, which may end
    before its process.
    """
    name = f"end-with-{pid}"
    if not hasattr(os, "pidfd_open") or any(thread.name == name for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(pid,), name=name, daemon=True).start()


def _watch(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(pid)], [], [])  # readable once the process has ended
    os.kill(os.getpid(), signal.SIGKILL)


def kill_children() -> None:
    """Kill the multiprocessing children of this process and all their descendants, and wait for them.

    A parent is killed before its children, so that it starts no others.
    """
    killed: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(child.pid)
            killed += [parent, *parent.children(recursive=True)]
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(killed, timeout=KILLED_WITHIN_S)
