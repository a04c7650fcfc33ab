"""A port for somebody who is told one and binds it later, in benchmarks and tests.

What `verl` itself starts sets SO_REUSEADDR: `reserve_port` holds the port until then.
"""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

ABOVE_RAY = 20_000
"""Ray's workers have the ports below."""
DIRECTORY = Path(tempfile.gettempdir(), "verl-test-ports")
HELD: list[IO[str]] = []
"""Locks on the ports that this process has chosen, while it lives."""


def free_port() -> int:
    """Free until it is bound, however late: the kernel gives it to nobody, and others who ask find its file locked."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    DIRECTORY.mkdir(exist_ok=True)
    for port in random.sample(range(ABOVE_RAY, low), 100):
        file = (DIRECTORY / str(port)).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as one:
                one.bind(("127.0.0.1", port))
        except OSError:
            file.close()
        else:
            HELD.append(file)
            return port
    raise AssertionError(f"no port between {ABOVE_RAY} and {low} is free")
