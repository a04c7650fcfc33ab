"""Ray workers, and programs, that are forked from a process which has torch, transformers and vLLM loaded.

Every actor of a test has a process of its own, and importing them takes it several seconds of processor time, vLLM 13:
more than most tests take. Workers are forked as those of a run are (`verl.trainer.fleet.warm`), but of one process for
all tests. A driver, or another program of ours, may be such a fork, too: a `Fork` is used like a subprocess.

What depends on the whole of it does without: a run as users start it (tests/e2e/test_training.py), runs that are
interrupted while they start, and one whose driver is killed (tests/weight_sync/test_faults.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(sys.path[0])  # not the tests' own directory, whose names are not modules

from verl.trainer.fleet.warm import ray_worker
from verl.trainer.fleet.warm.forks import PR_SET_PDEATHSIG, become_worker, enter, keep_spares, receive
from verl.trainer.fleet.warm.ray_worker import send
from verl.trainer.fleet.warm.server import EVERYBODY, OF_VLLM, load

PR_SET_CHILD_SUBREAPER = 36
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")]
MODELS += [f"vllm.model_executor.models.{name}" for name in ("llama", "qwen2", "qwen3", "qwen3_moe")]
"""Of most tests."""
LISTENER = 900
"""The number of a new server's socket there."""
PATIENCE_S = 900.0
"""With a program that takes a minute on a machine that does nothing else. Below the time limit of a test."""
ENVIRONMENT = {"RAY_prestart_worker_first_driver": "0"}
"""For `ray.init`: otherwise it starts workers before it knows their runtime environment, and never uses them."""


@dataclass(frozen=True)
class WarmWorkers:
    path: str
    """Of the server's socket."""
    pid: int
    """The server's. The workers are its children."""

    @property
    def runtime_env(self) -> dict[str, dict[str, str]]:
        """For `ray.init`."""
        return {"env_vars": {ray_worker.SOCKET: self.path}}

    @property
    def override(self) -> str:
        """For the command line of a job."""
        return f"ray_kwargs.ray_init={{runtime_env:{{env_vars:{{{ray_worker.SOCKET}:'{self.path}'}}}}}}"


class Fork:
    """`python -m module arguments` in a session of its own, of what `warm` forks: the part of Popen that tests use."""

    def __init__(
        self,
        warm: WarmWorkers,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[Any],
        stderr: IO[Any],
        spawns: bool = False,
    ) -> None:
        """`spawns`: what it first spawns, with multiprocessing, is forked as well."""
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(warm.path)
        request = ["program", [module, *arguments], dict(env), os.getcwd(), spawns]
        with open(os.devnull) as nothing:
            send(self._connection, request, {0: nothing.fileno(), 1: stdout.fileno(), 2: stderr.fileno()})
        self.pid = self._receive()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"the program with process id {self.pid}", timeout)
            self.returncode = os.waitstatus_to_exitcode(self._receive())
            self._connection.close()
        return self.returncode

    def _receive(self) -> int:
        if not (answer := self._connection.recv(8)):
            raise RuntimeError("the process that forks programs has ended")
        return int.from_bytes(answer, "big")

    def end(self, *written: Path) -> int:
        """Its exit code. Of a program that hangs, which ends here, what it has `written` is told."""
        try:
            return self.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            said = "\n".join(path.read_text() for path in written)
            raise AssertionError(f"not done within {PATIENCE_S} s:\n{said}") from None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def written_by(
    warm: WarmWorkers, module: str, *arguments: object, code: int = 0, spawns: bool = False, **environment: str
) -> str:
    """What `python -m module arguments`, such a fork, writes. Raises AssertionError if its exit code is not `code`."""
    quiet = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.NamedTemporaryFile("w") as file:
        environment = os.environ | quiet | environment
        process = Fork(warm, module, [*map(str, arguments)], env=environment, stdout=file, stderr=file, spawns=spawns)
        ended, written = process.end(Path(file.name)), Path(file.name).read_text()
    assert ended == code, written
    return written


def lighten_ray() -> None:
    """In a process that is about to start a Ray: with workers of ours, and with agents that observe nothing."""
    from ray._private import ray_constants, utils

    ray_constants.SETUP_WORKER_FILENAME = ray_worker.__file__
    utils.get_dashboard_dependency_error = lambda: ImportError("not looked for")


@contextlib.contextmanager
def warm_base() -> Iterator[str]:
    """A process that imports all that when it is first asked for something. The path of the socket for asking."""
    with _listening() as (listener, path):
        command = [sys.executable, __file__, str(listener.fileno())]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            pass_fds=[listener.fileno()],
        ) as server:
            listener.close()  # the server's alone: when it is gone, who asks is refused
            try:
                yield path
            finally:
                server.kill()


@contextlib.contextmanager
def warm_workers(base: str) -> Iterator[WarmWorkers]:
    """A server of one's own, forked from that of `warm_base`: its children are workers of this process alone."""
    with _listening() as (listener, path):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(base)
            send(connection, None, {LISTENER: listener.fileno()})
            listener.close()
            answer = connection.recv(8)
        if not answer:  # and 0 as a process id would mean this process's whole group
            raise RuntimeError("the process that forks Ray's workers has ended before it had imported everything")
        pid = int.from_bytes(answer, "big")
        try:
            yield WarmWorkers(path, pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, str]]:
    with tempfile.TemporaryDirectory(prefix="verl-warm-") as directory, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(directory, "socket"))
        listener.bind(path)  # here, so that nobody can ask too early
        listener.listen(64)
        yield listener, path


# --- in the server ----------------------------------------------------------------------------------------------------


def serve(listener: socket.socket, *, loaded: bool) -> list[str]:
    """Returns in a fork that is to be a program: its module and arguments."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # neither is inherited
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that what a program leaves behind is seen among the children
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        connection, _ = listener.accept()
        if not loaded:
            load([*EVERYBODY, *OF_VLLM, *MODELS])
            loaded = True
        if os.fork() == 0:
            listener.close()
            request = receive(connection)
            if request is None:
                with connection:
                    connection.sendall(os.getpid().to_bytes(8, "big"))
                return serve(socket.socket(fileno=LISTENER), loaded=True)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            kind, *how = request
            if kind == "program":
                return become_program(connection, *how)
            become_worker(connection, *how)
        connection.close()


def become_program(
    connection: socket.socket, command: list[str], environment: dict[str, str], directory: str, spawns: bool
) -> list[str]:
    """Here this process waits for another, which is the program, to tell how it ended."""
    pid = os.fork()
    if pid:
        connection.sendall(pid.to_bytes(8, "big"))
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            connection.sendall(status.to_bytes(8, "big"))
        os._exit(0)
    os.setsid()
    if spawns:
        keep_spares(1, connection)
    connection.close()
    enter(environment, directory)
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [directory, *filter(None, inherited), *(path for path in sys.path if path not in inherited)]
    return command


def run(module: str, *arguments: str) -> None:
    """`python -m module arguments`, with a light Ray."""
    lighten_ray()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(*serve(socket.socket(fileno=int(sys.argv[1])), loaded=False))
