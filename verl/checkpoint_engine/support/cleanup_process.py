"""What has to happen when a process has ended, also when it was killed and can do nothing itself any more."""

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
    """A small process that runs a program when this one ends, however it ends.

    It holds the read end of a pipe whose only writer is this process, not its forks, so a SIGKILL reads as end-of-file.
    It is nobody's child and in a session of its own: a signal to the process group, and Ray when it ends a worker,
    would take children along.
    """

    def __init__(self, program: Path, *arguments: str, holding: int | None = None) -> None:
        """`program`: a file with Python for the standard library alone. Its `main` is called with `arguments`, and the
        lines that were sent. `holding`: a file that it keeps open as long as it lives, for its lock."""
        its_stdin, self._write_end = os.pipe()
        self._read_end, its_stdout = os.pipe()
        subprocess.run(
            [sys.executable, "-I", "-S", outliving.__file__, str(program), *arguments],
            stdin=its_stdin,
            stdout=its_stdout,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[holding] if holding is not None else [],
            check=True,
        )
        os.close(its_stdin)
        os.close(its_stdout)
        self.pid = int(os.read(self._read_end, 32))
        _open.add(self)

    def send(self, line: str) -> None:
        """Tell the program something. It is read when this process ends."""
        os.write(self._write_end, f"{line}\n".encode())

    def leave(self) -> None:
        """Have the program run now, if no other process has this one's end of the pipe; do not wait for it. Idempotent.

        In a fork of this process, such as a DataLoader's worker, it is done at once: for the program it is this process
        that ends.
        """
        if self._write_end >= 0:
            os.close(self._write_end)
            os.close(self._read_end)
            self._write_end = -1

    def close(self) -> None:
        """Have the program run now and wait for the process to end. Idempotent."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
            select.select([self._read_end], [], [], CLOSE_TIMEOUT_S)  # end-of-file once the process is gone
            os.close(self._read_end)
