"""Remove files and shared memory of engines whose processes have ended.

vLLM 0.32 has its sockets as files, a temporary file at which its ranks meet, which it never removes, and a ring buffer
of 160 MiB in shared memory per worker; libraries that it loads make semaphores. SGLang 0.5 also has sockets as files,
and reports its load in shared memory. Killed processes remove none of them, and both engines kill theirs at shutdown.
A janitor therefore outlives the server and removes them.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ..memory.janitor import Janitor, sweep
from ..support import envs
from ..support.temporary import SHM_DIR, directory_for_sockets

PREFIX = "verl-engine-"
SOCKET_OF_VLLM = f"{PREFIX}xxxxxxxx/{uuid.UUID(int=0)}"
"""As long as its paths in the temporary directory are."""
LOOK_EVERY_S = 0.05
OURS = ("psm_", "vllm_", "sem.mp-", "sglang_")
"""Prefixes of Python's and the engines' files there. Arenas, which engines map, too, have another owner."""


class Leftovers:
    """Files of one engine. The server process, the parent of the engine's processes, owns it. They are removed when
    that process ends, even if killed, or leaves the `with` block."""

    def __init__(self) -> None:
        """Raises ConfigError."""
        temporary = directory_for_sockets(SOCKET_OF_VLLM)
        sweep(temporary, PREFIX)
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
        """The engine's sockets and temporary files."""
        self._lock = (self.directory / "lock").open("w", encoding="utf-8")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._janitor = Janitor(self.directory)
        self._found: set[Path] = set()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for an engine's server that runs as a program: it makes its files and sockets in `directory`."""
        return {"TMPDIR": str(self.directory), "VLLM_RPC_BASE_PATH": str(self.directory)}

    def memory_directory(self) -> Path:
        """Make a directory in shared memory, for our files that the engine's processes read."""
        directory = Path(tempfile.mkdtemp(prefix="verl-adapter-", dir=envs.shm_dir()))
        self._janitor.watch(directory)
        return directory

    @contextmanager
    def taking_temporary_files(self) -> Iterator[None]:
        """In this block, this process makes temporary files in `directory`; so do processes that it starts, always."""
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
        """Record shared memory that the engine's processes map as it starts in this block; they map no more later.

        A thread polls, because a server may be killed before its engine has started. It reads the mappings of processes
        only for new file names, and twice, because a file has its name a moment before it is mapped.
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
    """The engines' files in shared memory that descendants of process `pid` have mapped."""
    mapped: set[str] = set()
    for process in psutil.Process(pid).children(recursive=True):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # By number: a semaphore is mapped under a name that it has for a moment only.
        mapped |= {line.split(maxsplit=5)[4] for line in maps.splitlines() if f" {SHM_DIR}/" in line}
    return {Path(file) for file in files_of_ours() if str(file.inode()) in mapped}


def files_of_ours() -> list[os.DirEntry[str]]:
    """The files in shared memory with the prefixes OURS, also those of other servers on this machine."""
    with os.scandir(SHM_DIR) as files:
        return [file for file in files if file.name.startswith(OURS)]
