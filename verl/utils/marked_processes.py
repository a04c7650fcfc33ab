"""Processes with a mark in their environment, which what they start inherits, in whatever session."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import psutil


def kill_marked(variable: str, value: str) -> None:
    """Kill those on this host that were started with this variable."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has just ended, or is somebody else's
            if f"{variable}={value}".encode() in _environment(process):
                process.kill()


def _environment(process: psutil.Process) -> list[bytes]:
    """One that has taken a title has overwritten the beginning, where psutil stops to read."""
    if sys.platform == "linux":
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return [f"{name}={value}".encode() for name, value in process.environ().items()]
