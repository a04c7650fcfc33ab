"""Ray workers that are forked from a process which has torch and transformers loaded.

Every actor of a test has a process of its own, and importing them takes it several seconds of processor time: more than
most tests take. Ray starts its workers with a command of our choice (`py_executable` of a job's runtime environment);
ours asks the server below for a fork that goes on as Ray's own worker would, with the environment, directory and
output that Ray gave it. Runs that tests start as a user would, with a driver of their own, do without.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def warm_workers() -> Iterator[dict[str, str]]:
    """The runtime environment for `ray.init`. The server lives as long as the block, or as this process."""
    with tempfile.TemporaryDirectory(prefix="verl-warm-") as directory, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(directory, "socket"))
        listener.bind(path)  # here, so that nobody can ask too early
        listener.listen(64)
        with subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            pass_fds=[listener.fileno()],
        ) as server:
            listener.close()  # the server's alone: when it is gone, who asks is refused
            try:
                yield {"py_executable": f"{sys.executable} -I -S {__file__} ask {path}"}
            finally:
                server.kill()


# --- in the process that Ray starts -----------------------------------------------------------------------------------


def ask(path: str, arguments: list[str]) -> None:
    """Have a worker forked, and last as long as it does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(request)
        connection.recv(1)


# --- in the server ----------------------------------------------------------------------------------------------------


def serve(listening: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # not inherited
    with socket.socket(fileno=listening) as listener:
        load()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                become_worker(connection)
            connection.close()


def load() -> None:
    import tensordict  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    gc.collect()
    gc.freeze()


def become_worker(connection: socket.socket) -> None:
    length, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    request = b""
    while len(request) < int.from_bytes(length, "big"):
        request += connection.recv(2**16)
    (script, *arguments), environment, directory = json.loads(request)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [script, *arguments]
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(script), *filter(None, inherited), *(p for p in sys.path if p not in inherited)]
    os.set_inheritable(connection.fileno(), False)  # open until this process ends, and in no other
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.path.pop(0)  # the tests' own directory
        serve(int(sys.argv[2]))
    else:
        ask(sys.argv[2], sys.argv[3:])
