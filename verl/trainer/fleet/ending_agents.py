"""The program that ends Ray's remaining processes. Needs the standard library only: `support.outliving` runs it.

The kernel ends Ray's daemons with the driver, and our actors end with the daemons. Ray's own agents notice it, too, but
then try for a minute to report it to a daemon that is gone. Each has its session in its command line until it has
imported what it needs and calls itself `ray::...`.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

TRIES = 10
BETWEEN_TRIES_S = 0.2


def main(arguments: list[str], lines: list[str]) -> None:
    """Kill the processes of Ray's session in the directory that is the one argument."""
    (session,) = arguments
    for _ in range(TRIES):
        found = False
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if is_of_session(pid, session):
                    found = True
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:  # it has just ended, or is somebody else's
                pass
        if not found:
            break
        time.sleep(BETWEEN_TRIES_S)


def is_of_session(pid: str, session: str) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as title:
        command = title.read().decode(errors="replace").split("\0")
    if f"--session-dir={session}" in command:
        return True
    return command[0].startswith("ray::") and any(name.startswith(session + "/") for name in files(pid))


def files(pid: str) -> Iterator[str]:
    """The files that the process has open."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile: an agent that starts opens and closes many
            yield os.readlink(f"/proc/{pid}/fd/{fd}")
