"""What `--check` sees of this host: where a run would write, its port, shared memory, network interfaces."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.support.admission import LOOK_S, can_filter
from verl.checkpoint_engine.support.memory import free_nbytes, in_words
from verl.checkpoint_engine.support.network import unknown_interfaces
from verl.trainer.fleet.address import LOCAL, address_of
from verl.workers.config import PPOConfig

PEOPLE = range(1000, 65534)
"""User ids below are those of the system's own services."""


def unwritable(config: PPOConfig) -> Iterator[str]:
    """A line for each output directory in which no file could be made. Makes none."""
    for key, directory in (
        ("trainer.default_local_dir", config.trainer.output_dir),
        ("trainer.rollout_data_dir", config.trainer.rollout_data_dir),
        ("trainer.validation_data_dir", config.trainer.validation_data_dir),
    ):
        if directory is not None and (why := _why_not(Path(directory).absolute())):
            yield f"{key}={directory} is not writable: {why}"


def _why_not(directory: Path) -> str | None:
    there = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
    if not there.is_dir():
        return f"{there} is not a directory"
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{there} is on a read-only file system"
    # The kernel's own file systems refuse even root, whom `access` lets do everything.
    if not os.access(there, os.W_OK | os.X_OK) or Path("/proc") in (there, *there.parents):
        return f"no file can be made in {there}"
    return None


def taken_ports(config: PPOConfig) -> Iterator[str]:
    """A line for a port of this host that the run would serve and another process has now."""
    port, host = config.trainer.metrics_port, config.trainer.metrics_host
    if not port:
        return
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as exc:
        yield f"trainer.metrics_port={port} cannot be served at {host} now: {exc.strerror}"


def starts_ray(config: PPOConfig) -> bool:
    """Whether the run starts a Ray of its own on this host, rather than joins one, whose hosts this one cannot see."""
    return address_of(config.ray_kwargs.ray_init)[0] == LOCAL


def memory_for_weights(config: PPOConfig, arena_nbytes: int) -> str:
    """The line of the plan on shared memory. `arena_nbytes`: for each rollout node."""
    directory = envs.shm_dir()
    if not starts_ray(config):
        return f"shared memory: {in_words(arena_nbytes)} of {directory} for the weights on each host with rollouts"
    needed = config.actor_rollout_ref.rollout.nnodes * arena_nbytes
    return f"shared memory: {in_words(needed)} for the weights; {in_words(free_nbytes(directory))} free in {directory}"


def unseen_hosts(config: PPOConfig) -> Iterator[str]:
    """A line if the run would be on hosts of a Ray that it joins: this host cannot tell what they have."""
    if not starts_ray(config):
        address, said_by = address_of(config.ray_kwargs.ray_init)
        yield f"the hosts of {said_by}={address}: their free shared memory and network interfaces were not looked at"


def absent_interfaces(config: PPOConfig, device: str) -> Iterator[str]:
    """A line for each network interface that the environment names for a run on this host, which does not have it."""
    if starts_ray(config):
        used = ("GLOO",) if device == "cpu" else ("GLOO", "NCCL")
        yield from (line for variable, line in unknown_interfaces().items() if variable.startswith(used))


def unfiltered_users() -> Iterator[str]:
    """A line if the kernel does not let this user keep others of this host away, and there are such people."""
    if can_filter():
        return
    others = {
        process.info["username"] or "unknown"
        for process in psutil.process_iter(["uids", "username"])
        if (uids := process.info["uids"]) and uids.real in PEOPLE and uids.real != os.getuid()
    }
    if others:
        yield (
            "this kernel lets only CAP_NET_ADMIN filter who connects: other users of this host "
            f"({', '.join(sorted(others))}) are cut off within {LOOK_S * 1000:.0f} ms, and what they send until then "
            "may be read (SECURITY.md)"
        )
