"""Forks of a process without threads that become workers of Ray, and what those spawn first.

Runs in the process of `server.py`, and in its forks. A fork has the environment, directory and output that Ray gave the
process that asked (`ray_worker.py`). It ends with that process: Ray kills a worker that has not registered by killing
what it has started.

vLLM's engine core is a process that multiprocessing spawns. A worker forks a child for the first of these before it has
threads; the child goes on as the spawned process would. So does an engine core, for the workers of its ranks.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import util
from typing import Any

from verl.trainer.fleet.warm.ray_worker import send

PR_SET_PDEATHSIG = 1
RANKS = 2
"""An engine core has children ready for so many ranks."""


def become_worker(
    connection: socket.socket,
    command: list[str],
    environment: dict[str, str],
    directory: str,
    limits: list[list[int]],
) -> None:
    """Go on as a worker of Ray, with `ray_worker.limits`. Does not return."""
    connection.sendall(b"1")  # whoever asks starts one itself if this process has ended instead
    script, *arguments = command
    os.setpgrp()  # as Ray starts its workers: it ends the group with the worker
    take_limits(limits)
    keep_spares(1, connection)
    enter(environment, directory)
    sys.argv = [script, *arguments]
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(script), *filter(None, inherited), *(p for p in sys.path if p not in inherited)]
    os.set_inheritable(connection.fileno(), False)  # open until this process ends, and in no other
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        os._exit(1)


def take_limits(limits: list[list[int]]) -> None:
    """Take over what `ray_worker.limits` has returned in a process with the same owner."""
    *numbered, (score,) = limits
    for number, soft, hard in numbered:
        resource.setrlimit(number, (soft, hard))
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write(str(score))


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def keep_spares(count: int, inherited: socket.socket | None = None) -> None:
    """Fork `count` children, which become the first processes that multiprocessing spawns. They close `inherited`."""
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        spares.append(_spare([inherited, *(here for _, here in spares)]))
    private: Any = util
    really_spawn = private.spawnv_passfds

    def spawn(path: bytes, command: list[str | bytes], descriptors: list[int]) -> int:
        if not spares or command[-1] != "--multiprocessing-fork":  # multiprocessing's own resource tracker
            pid: int = really_spawn(path, command, descriptors)
            return pid
        pid, here = spares.pop(0)
        wanted = {number: number for number in (0, 1, 2, *map(int, descriptors))}
        with here:
            send(here, [command[-2], dict(os.environ), os.getcwd()], wanted)
        return pid

    private.spawnv_passfds = spawn


def _spare(others: Sequence[socket.socket | None]) -> tuple[int, socket.socket]:
    """A child, and the socket by which it is told what to become. It closes `others`."""
    here, there = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for one in (here, *others):
            if one is not None:
                one.close()
        there = socket.socket(fileno=fcntl.fcntl(there.detach(), fcntl.F_DUPFD, 2000))  # out of the way
        _end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        _become_spawned(there)
    there.close()
    return pid, here


def _become_spawned(connection: socket.socket) -> None:
    sys.modules["setproctitle"].getproctitle()  # it looks for the title once, where it was when the process began
    code, environment, directory = receive(connection)
    connection.close()
    _end_with_parent(0)  # spawned processes outlive their parents
    enter(environment, directory)
    keep_spares(RANKS)
    sys.argv = ["-c", "--multiprocessing-fork"]
    status: Any = 1
    try:
        exec(code, {"__name__": "__main__"})  # as `python -c` would
    except SystemExit as exc:
        status = exc.code
    finally:
        os._exit(status)  # as multiprocessing's own forks: to take the whole interpreter down needs seconds


def _end_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def receive(connection: socket.socket) -> Any:
    """What `send` sent. Ends this process if nobody sends any more."""
    length, received, _, _ = socket.recv_fds(connection, 8, 253)
    if not length:
        os._exit(0)
    data = b""
    while len(data) < int.from_bytes(length, "big"):
        data += connection.recv(2**16)
    request, wanted = json.loads(data)
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(aside, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return request


def enter(environment: dict[str, str], directory: str) -> None:
    """Take over an environment and a directory, with what a new process reads of them when it imports."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(directory)
    _take_threads(environment)
    sys.modules["numpy"].random.seed()  # forks would draw the same numbers
    sys.modules["torch._dynamo"].config.disable = environment.get("TORCHDYNAMO_DISABLE", "") == "1"


def _take_threads(environment: dict[str, str]) -> None:
    """OpenMP has read its variables when it was loaded."""
    threads, cores = environment.get("OMP_NUM_THREADS", ""), environment.get("GOMP_CPU_AFFINITY", "")
    sys.modules["torch"].set_num_threads(int(threads) if threads.isdigit() else len(os.sched_getaffinity(0)))
    if cores and all(core.isdigit() for core in cores.split()):
        os.sched_setaffinity(0, {int(core) for core in cores.split()})
