"""`python -m verl.trainer.fleet.warm.server FD DRIVER [MODULE ...]`: imports modules, and forks workers of Ray.

FD is the number of a socket that listens. Whoever connects gets a fork (`forks.py`). Ends with the process DRIVER, and
removes the socket's directory.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
from typing import Any

from verl.compat.vllm import inspect_models_here
from verl.trainer.fleet.warm.forks import become_worker, receive

EVERYBODY = (
    "setproctitle",
    "tensordict",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.auto",
)
"""Imported for every worker."""
OF_VLLM = ("vllm.model_executor.models.registry", "vllm.v1.engine.async_llm", "vllm.v1.engine.core")
"""Imported where engines are vLLM's."""


def serve(listener: socket.socket, driver: int) -> None:
    """Fork a worker for every connection, until the process of the pidfd `driver` ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    watched: list[Any] = [listener, driver]
    while driver not in select.select(watched, [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(driver)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _, *how = receive(connection)
            become_worker(connection, *how)
        connection.close()


def load(modules: list[str]) -> None:
    """Import `modules` without Ray: a worker of a process that had it does not register."""
    hidden: Any = sys.modules
    hidden["ray"] = None
    for module in modules:
        importlib.import_module(module)
    if OF_VLLM[0] in modules:
        inspect_models_here()
    del hidden["ray"]
    gc.collect()
    gc.freeze()  # so that forks share the pages


def main(listener: socket.socket, pid: int, modules: list[str]) -> None:
    directory = os.path.dirname(listener.getsockname())
    try:
        driver = os.pidfd_open(pid)
        load(modules)
        serve(listener, driver)
    except ProcessLookupError:  # it has ended already
        pass
    finally:  # one that is killed leaves it
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
