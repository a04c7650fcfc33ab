"""Run a program after a process has ended, even if the process was killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import weakref
from pathlib import Path

from . import outliving

CLOSE_TIMEOUT_S = 30.0
_open: weakref.WeakSet[CleanupProcess] = weakref.WeakSet()


def _leave_all() -> None:
    for one in list(_open):
        one.leave()


os.register_at_fork(after_in_child=_leave_all)


class CleanupProcess:
    """A small process that runs a program when this process ends, even if killed.

    It reads a pipe whose only writer is this process, not its forks, so a SIGKILL reads as end-of-file. It is no child
    of this process and has its own session: a signal to the process group, and Ray at the end of a worker, would also
    end children.
    """

    def __init__(self, program: Path, *arguments: str, holding: int | None = None, speaks: bool = False) -> None:
        """`program`: a Python file that needs the standard library only. Its `main` is called with `arguments` and the
        lines of `send`. `holding`: a file that the process keeps open for its lock. `speaks`: its stderr is that of
        this process."""
        its_stdin, self._write_end = os.pipe()
        self._read_end, its_stdout = os.pipe()
        subprocess.run(
            [sys.executable, "-I", "-S", outliving.__file__, str(program), *arguments],
            stdin=its_stdin,
            stdout=its_stdout,
            stderr=None if speaks else subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[holding] if holding is not None else [],
            check=True,
        )
        os.close(its_stdin)
        os.close(its_stdout)
        self.pid = int(os.read(self._read_end, 32))
        _open.add(self)

    def send(self, line: str) -> None:
        """Send a line to the program, which reads it when this process ends."""
        os.write(self._write_end, f"{line}\n".encode())

    def leave(self) -> None:
        """Run the program now, without waiting for it, if no other process has this end of the pipe. Idempotent.

        A fork of this process, such as a DataLoader's worker, calls it at once: the program waits for the end of the
        original process only.
        """
        if self._write_end >= 0:
            os.close(self._write_end)
            os.close(self._read_end)
            self._write_end = -1

    def close(self) -> None:
        """Run the program now and wait until its process has ended. Idempotent."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
            select.select([self._read_end], [], [], CLOSE_TIMEOUT_S)  # end-of-file once the process is gone
            os.close(self._read_end)
