"""What engines leave on the machine when their processes are ended, and who removes it.

vLLM 0.32 keeps its sockets as files, lets its ranks meet through a temporary file that it never removes, and has, for
each worker, a ring buffer of 160 MiB in shared memory; libraries that it loads make semaphores. SGLang 0.5 has sockets
as files, too, and tells its load in shared memory. Processes that are killed remove none of them, and the shutdown of
both kills them. A janitor therefore outlives the server and cleans up.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ..memory.janitor import Janitor, sweep
from ..support import envs

SHM_DIR = Path("/dev/shm")
PREFIX = "verl-engine-"
LOOK_EVERY_S = 0.05
OURS = ("psm_", "vllm_", "sem.mp-", "sglang_")
"""Names that Python's and the engines' files there begin with. Arenas, which children map, too, have another owner."""


class Leftovers:
    """Belongs to the server process, the parent of the engine's processes. Removed when that ends, however it ends, or
    when it leaves its `with` block."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()), PREFIX)
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        """For the engine's sockets and temporary files. The path is short: a socket's may have 107 characters."""
        self._lock = (self.directory / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._janitor = Janitor(self.directory)
        self._found: set[Path] = set()

    @property
    def environment(self) -> dict[str, str]:
        """For an engine's server that is started as a program: its files and sockets are in `directory` then."""
        return {"TMPDIR": str(self.directory), "VLLM_RPC_BASE_PATH": str(self.directory)}

    def memory_directory(self) -> Path:
        """A new directory in shared memory, for files of ours that the engine's processes read."""
        directory = Path(tempfile.mkdtemp(prefix="verl-adapter-", dir=envs.shm_dir()))
        self._janitor.watch(directory)
        return directory

    @contextmanager
    def taking_temporary_files(self) -> Iterator[None]:
        """What this process makes in the block, and what processes that begin in it ever make, is in `directory`."""
        before = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.directory)
        try:
            yield
        finally:
            tempfile.tempdir, variable = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable

    @contextmanager
    def finding_shared_memory(self) -> Iterator[None]:
        """Note what the engine's processes map while it starts: they map nothing new later.

        A thread looks again and again, because a server may be killed before its engine has started. What processes
        have mapped it reads only for new names: twice, as a file has its name a moment before it is mapped.
        """
        started = threading.Event()

        def look() -> None:
            known: set[str] = set()
            recent: set[str] = set()
            while not started.wait(LOOK_EVERY_S):
                names = {file.name for file in files_of_ours()}
                if names - known:
                    self._find_shared_memory()
                known, recent = recent, names

        thread = threading.Thread(target=look, name="engine-leftovers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            started.set()
            thread.join()
            self._find_shared_memory()

    def _find_shared_memory(self) -> None:
        for path in shared_memory_of(os.getpid()) - self._found:
            self._found.add(path)
            self._janitor.watch(path)

    def remove(self) -> None:
        self._janitor.close()
        self._lock.close()

    def __enter__(self) -> Leftovers:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def shared_memory_of(pid: int) -> set[Path]:
    """Files in shared memory of engines that the descendants of `pid` have mapped."""
    mapped: set[str] = set()
    for process in psutil.Process(pid).children(recursive=True):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # By number: a semaphore is mapped under a name that it has for a moment only.
        mapped |= {line.split(maxsplit=5)[4] for line in maps.splitlines() if f" {SHM_DIR}/" in line}
    return {Path(file) for file in files_of_ours() if str(file.inode()) in mapped}


def files_of_ours() -> list[os.DirEntry[str]]:
    """Also those of other servers on this machine."""
    with os.scandir(SHM_DIR) as files:
        return [file for file in files if file.name.startswith(OURS)]
