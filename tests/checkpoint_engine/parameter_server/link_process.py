"""An engine, or a server, in a process of its own, to be killed. A program that says on stdout how far it is."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from verl.checkpoint_engine.parameter_server.engine_link import EngineLink
from verl.checkpoint_engine.parameter_server.engine_receiver import receive


def engine(socket_path: str) -> None:
    for name, _ in receive(socket_path, "cpu", 60):
        print(name, flush=True)
        time.sleep(600)


def server() -> None:
    link = EngineLink("cpu-0", 1024, timeout_s=60)
    print(link.socket_path, flush=True)
    time.sleep(600)


def link_sockets(pid: int) -> list[str]:
    """Where links of process `pid` listen for engines, or talk to one."""
    return re.findall(rf"@verl-engine-link-{pid}-\w+", Path("/proc/net/unix").read_text())


if __name__ == "__main__":
    {"engine": engine, "server": server}[sys.argv[1]](*sys.argv[2:])
