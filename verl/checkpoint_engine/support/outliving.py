"""The process of a `CleanupProcess`: `python outliving.py PROGRAM ARGUMENT ...`. The standard library alone.

It has its own session, so it gets no signals of its creator's group. When the process at the other end of its standard
input is gone, it calls `main` of the file PROGRAM with the arguments and the received lines.
"""

import os
import signal
import sys
import types
from collections.abc import Callable


def program(path: str) -> Callable[[list[str], list[str]], object]:
    """Load `main` of the program now, because its file may be gone when it is called."""
    module = types.ModuleType("cleanup")
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
    found: Callable[[list[str], list[str]], object] = module.__dict__["main"]
    return found


def outlive() -> None:
    main, arguments = program(sys.argv[1]), sys.argv[2:]
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"%d" % os.getpid())
    main(arguments, sys.stdin.read().splitlines())


if __name__ == "__main__":
    outlive()
