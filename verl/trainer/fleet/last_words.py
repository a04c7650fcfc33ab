"""The program that says why Ray has ended a driver. Needs the standard library only: `support.outliving` runs it.

A driver whose call needs Ray's object store when the raylet dies is ended by Ray within that call, with exit code 1
and a line in a log file alone. A driver that something else ended has no such line.
"""

import os
import sys
from pathlib import Path

ENDED_BY_RAY = b"The connection to the plasma store is failed. Terminate the process"
TAIL_NBYTES = 65536


def main(arguments: list[str], lines: list[str]) -> None:
    """Write to stderr what the lines say, if Ray has ended the driver: its logs are in the directory `arguments[0]`,
    its process id is `arguments[1]`."""
    logs, pid = arguments
    if any(ENDED_BY_RAY in tail(log) for log in Path(logs).glob(f"python-core-driver-*_{pid}.log")):
        sys.stderr.write("".join(f"{line}\n" for line in lines))


def tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-min(file.seek(0, os.SEEK_END), TAIL_NBYTES), os.SEEK_END)
        return file.read()
