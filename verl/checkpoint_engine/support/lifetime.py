"""How a process ends with another that it belongs to."""

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
    """Have this process killed when process `pid` is gone. Idempotent. Does nothing where there are no pidfds.

    A parent-death signal of the kernel (PR_SET_PDEATHSIG) would follow the thread that started us, which may end before
    its process does.
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
    """Kill what multiprocessing has started in this process, with all that those have started, and wait for it.

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
