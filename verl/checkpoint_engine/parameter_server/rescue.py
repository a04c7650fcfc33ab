"""Rescue servers that a writer has paused, if its process ends before they serve again, even if it is killed.

A small process outlives the writer (`rescuing`). It resumes a server whose weights are whole. A server with torn
weights loads the version again: from memory that is kept for it on this host, from the files of a checkpoint if they
have not changed, or through another update. The process takes over the writer's claim. It leaves servers alone that
another writer has claimed.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..memory.janitor import sweep
from ..support.cleanup_process import CleanupProcess
from . import rescuing
from .checkpoint_directory import State
from .writers import Writer

PREFIX = "verl-rescue-"
ANSWERS_IN = "answers"
"""The directory in a kept arena for ranks that answer in files."""
Again = Callable[[str | None, int], Mapping[str, Any]]
"""(path of the kept arena or None, version) to the requests with which a server reports its version and loads this
one."""


class Rescue:
    """The rescue of one writer, which reports each action on a server before it acts."""

    def __init__(self, shm_dir: Path, answers: str, writer: Writer) -> None:
        """`answers`: the method of vLLM's workers that answers an `Order`. `writer`: the owner of the servers. It
        starts no process before a server is paused."""
        self._shm_dir, self._answers, self._writer = shm_dir, answers, writer
        self._root: Path | None = None
        self._process: CleanupProcess | None = None
        self._told: dict[str, str] = {}
        self._kept: dict[str, Path] = {}
        self._paused: set[str] = set()

    def pausing(self, url: str, engine: str) -> None:
        self._paused.add(url)
        self._tell(url, engine, state="paused")

    def loading(
        self,
        url: str,
        engine: str,
        arena_path: str | None = None,
        version: int | None = None,
        files: Mapping[str, State] | None = None,
        command: Sequence[str] = (),
        again: Again | None = None,
        **called: str,
    ) -> None:
        """Report that the server begins to load: `version` of an arena, on this host or another, or weights in this
        process's memory that can be loaded again from `files` or by `command`. `called`: their `label` for servers and
        their `load` for workers. `again`: for engines without a notion of writers."""
        self._forget(url)
        arena = self._keep(url, Path(arena_path)) if arena_path is not None else None
        kept = str(arena) if arena is not None else None
        what: dict[str, Any] = {"label": str(version), "load": ""} | called
        if again is not None and version is not None:
            what |= again(kept, version)
        source = {"arena_path": kept, "version": version} if kept is not None else {"files": files} if files else None
        self._tell(url, engine, state="loading", source=source, version=version, command=[*command], **what)

    def serving(self, url: str, engine: str) -> None:
        self._tell(url, engine, state="serving")
        self._paused.discard(url)
        self._forget(url)

    def close(self) -> None:
        """Start the rescue of servers that do not serve, without waiting for it. Idempotent."""
        process, self._process = self._process, None
        if process is not None and self._paused:
            process.leave()
        elif process is not None:
            process.close()

    def _keep(self, url: str, arena: Path) -> Path | None:
        """A second name for what the arena has committed, which may be gone by then; None if it is not on this host."""
        kept = Path(tempfile.mkdtemp(dir=self._directory()))
        try:
            (kept / ANSWERS_IN).mkdir()
            for file in arena.iterdir():
                if file.name == "current" or file.name.startswith("slot-"):
                    (kept / file.name).hardlink_to(file)
        except OSError:
            shutil.rmtree(kept, ignore_errors=True)
            return None
        self._kept[url] = kept
        return kept

    def _forget(self, url: str) -> None:
        if (kept := self._kept.pop(url, None)) is not None:
            shutil.rmtree(kept, ignore_errors=True)

    def _tell(self, url: str, engine: str, **what: Any) -> None:
        self._told[url] = json.dumps({"url": url, "engine": engine, **what})
        try:
            self._started().send(self._told[url])
        except BrokenPipeError:  # somebody has killed it
            self._process = None
            process = self._started()
            for line in self._told.values():
                process.send(line)

    def _directory(self) -> Path:
        if self._root is None or not self._root.is_dir():
            sweep(self._shm_dir, PREFIX)
            self._root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._shm_dir))
        return self._root

    def _started(self) -> CleanupProcess:
        if self._process is None:
            root, writer = self._directory(), msgspec.json.encode(self._writer.rescuer()).decode()
            with (root / "lock").open("w", encoding="utf-8") as lock:  # its process holds it, and sees to what is kept
                fcntl.flock(lock, fcntl.LOCK_EX)
                arguments = (str(root), self._answers, writer)
                self._process = CleanupProcess(Path(rescuing.__file__), *arguments, holding=lock.fileno())
        return self._process
