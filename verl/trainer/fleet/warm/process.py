"""The driver's side of the process that forks Ray's workers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl import envs
from verl.checkpoint_engine.memory.publishing import publisher_environment
from verl.checkpoint_engine.support.temporary import directory_for_sockets
from verl.trainer.fleet.warm.server import EVERYBODY, OF_VLLM
from verl.utils.device import resolve_device
from verl.workers.config import PPOConfig

PREFIX = "verl-warm-"


@contextlib.contextmanager
def warm_process(config: PPOConfig) -> Iterator[str | None]:
    """The path of the socket of a process that forks workers, which ends with the block; None without one.

    It imports while the driver does. Workers that are asked for before it has imported wait for it; without it, Ray
    starts them as always.
    """
    if not wanted(config):
        yield None
        return
    room = directory_for_sockets(f"{PREFIX}xxxxxxxx/socket")
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=room) as directory,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = str(Path(directory, "socket"))
        listener.bind(path)  # here, so that nobody can ask too early
        listener.listen(64)
        modules = EVERYBODY + OF_VLLM * (config.actor_rollout_ref.rollout.name == "vllm")
        mine = [str(listener.fileno()), str(os.getpid())]
        server = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.fleet.warm.server", *mine, *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what libraries say when they are imported
            env=os.environ | _environment(),
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the driver
        )
        listener.close()  # the server's alone: when it is gone, whoever asks is refused
        try:
            yield path
        finally:
            server.kill()
            server.wait()


def wanted(config: PPOConfig) -> bool:
    """Whether workers may be forks: on a CPU, in a Ray that this run starts, with nothing that imports depend on."""
    arguments = config.ray_kwargs.ray_init
    engine = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    return (
        config.trainer.warm_workers == "auto"
        and sys.platform == "linux"
        and resolve_device(config.trainer.device) == "cpu"
        and not (arguments.get("address") or envs.ray_address() or _has_ray())
        and "runtime_env" not in arguments
        and engine.get("distributed_executor_backend") != "ray"
    )


def _has_ray() -> bool:
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _environment() -> dict[str, str]:
    """What is read when a process begins, or imports."""
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": envs.vllm_logging_level("ERROR")}
    return quiet | publisher_environment()
