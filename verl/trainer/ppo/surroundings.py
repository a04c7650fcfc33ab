"""What `--check` sees of this host: where a run would write, and the port that it would serve."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from verl.workers.config import PPOConfig


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
