"""A node's arena: versions of the weights in POSIX shared memory, in one or two slots.

    <shm>/verl-<job>-<node>/         0700, one per rollout node and job
        lock                         flock'ed by the owner as long as it lives
        slot-0.3                     the bytes of one version (0600); `.3` is the generation of the file
        slot-0.3.manifest            layout, plan and digests of the version that the slot holds, once committed
        current                      the committed version; replaced by rename, so it is either old or new

The owner (one process per rollout node) creates the arena and decides which slot is current. Trainer ranks of the same
host write into the spare slot; engines map the current one read-only. Control state never shares bytes with weights.

A slot file is replaced, not reused, if a process outside the sync may still map it: a trainer that missed its deadline
and writes later, a reader that hangs. It then writes to, or reads from, the old file, never the next version.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import ConfigError, IntegrityError
from ..plan.layout import Layout
from ..support.files import write_private
from ..support.memory import free_nbytes, in_words
from .committed import Committed, open_committed
from .digest import Manifest, verify
from .janitor import Janitor, await_removal, sweep
from .slot import SlotView

if TYPE_CHECKING:
    pass

ARENA_PREFIX = "verl-"
MAX_JOB_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_JOB_NAME}}}", re.ASCII)


@dataclass
class _Slot:
    path: Path
    layout: Layout
    """For which the file was made."""
    version: int | None = None
    """The committed version that it holds; None while it is spare or being written."""
    manifest: Manifest | None = None
    """Of that version; with a single slot also while it is being overwritten, as long as the bytes may be there."""

    @property
    def manifest_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.manifest")


class NodeArena:
    """An arena as its rollout node owns it. One per node, used from one thread at a time.

    Use as a context manager, or call `close`; a janitor process removes the directory if the owner is killed.
    """

    def __init__(self, directory: Path, layout: Layout, slots: list[_Slot], lock_fd: int, janitor: Janitor) -> None:
        self.directory = directory
        self.layout = layout
        """The layout of later versions. It may be set between two versions: the committed one keeps its own."""
        self._slots = slots
        self._current: _Slot | None = None
        self._writing: _Slot | None = None
        self._generation = len(slots)
        self._lock_fd = lock_fd
        self._janitor = janitor
        self._views: dict[Path, SlotView] = {}
        self._writable: dict[Path, SlotView] = {}

    @classmethod
    def create(cls, *, shm_dir: Path, job: str, node: str, layout: Layout, slots: int) -> NodeArena:
        """Reserve and pre-fault `slots` x `layout.nbytes` of shared memory.

        Raises ConfigError, before anything is allocated, if memory is missing (with the needed and free bytes), or if
        another process uses the arena of the same job and node.
        """
        for key, name in (("job", job), ("node", node)):
            require_name(key, name)
        sweep(shm_dir, ARENA_PREFIX)
        directory = shm_dir / f"{ARENA_PREFIX}{job}-{node}"
        await_removal(directory)  # of a node that was killed and is now replaced
        require_free_bytes(shm_dir, slots * layout.nbytes)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError as exc:
            raise ConfigError(f"the arena {directory} is in use by another process of this job") from exc
        lock_fd = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)  # at once, or after somebody who only looks whether it is locked
        janitor = Janitor(directory)
        try:
            made = [_Slot(directory / f"slot-{index}.{index}", layout) for index in range(slots)]
            for slot in made:
                _allocate(slot.path, layout.nbytes)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            janitor.close()
            os.close(lock_fd)
            raise
        return cls(directory, layout, made, lock_fd, janitor)

    @property
    def version(self) -> int | None:
        """The committed version; None if there is none."""
        return self._current.version if self._current else None

    @property
    def previous_version(self) -> int | None:
        """The version that `rollback` would make current again; None with one slot or before the second commit."""
        spare = self._spare()
        return spare.version if spare is not self._current else None

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory of all slots."""
        return sum(slot.layout.nbytes for slot in self._slots)

    def begin(self, version: int) -> Path:
        """Open the spare slot for `version` and return its path for the writers.

        The slot loses its previous version. With one slot that is the committed version: none is until `commit`.
        """
        if self._writing is not None:
            self.drop()
        slot = self._spare()
        overwritten = slot.manifest if slot is self._current else None
        if slot is self._current:
            (self.directory / "current").unlink(missing_ok=True)
            self._current = None
        self._forget(slot)
        is_other = slot.layout.digest != self.layout.digest
        if is_other or not slot.path.exists() or _is_read_by_someone(slot.path):
            self._replace(slot)
        elif overwritten is not None:
            slot.manifest = overwritten
        self._writing = slot
        return slot.path

    def base(self) -> tuple[Manifest, SlotView] | None:
        """The last committed version, the base of a delta; None if it is not whole any more.

        With a single slot it is in the slot that `begin` opened, until a member writes to that.
        """
        slot = self._current or self._writing
        if slot is None or slot.manifest is None:
            return None
        return slot.manifest, self._view(slot)

    def slot_view(self) -> SlotView:
        """The slot opened by `begin`, mapped read-only. The mapping stays from sync to sync. Raises IntegrityError."""
        if self._writing is None:
            raise IntegrityError("no slot is open for writing")
        return self._view(self._writing)

    def writable_view(self) -> SlotView:
        """The slot opened by `begin`, mapped writable for nodes that receive. Otherwise as `slot_view`."""
        if self._writing is None:
            raise IntegrityError("no slot is open for writing")
        path = self._writing.path
        if path not in self._writable:
            self._writable[path] = SlotView(path, self._writing.layout, writable=True)
        return self._writable[path]

    def commit(self, version: int, manifest: Manifest) -> None:
        """Make the slot opened by `begin` current, atomically for readers. Raises IntegrityError if none is open."""
        slot = self._writing
        if slot is None or manifest.version != version:
            raise IntegrityError(f"nothing was staged for version {version}", version=version, phase="commit")
        write_private(slot.manifest_path, manifest.encode())
        slot.version, slot.manifest = version, manifest
        self._point_at(slot)
        self._writing = None

    def drop(self) -> None:
        """Drop the slot that `begin` opened. Its file is replaced, because its writers may still be alive."""
        if self._writing is not None:
            self._replace(self._writing)
            self._writing = None

    def rollback(self) -> int:
        """Make the previous version current again and return it. Raises IntegrityError if there is none."""
        previous = self.previous_version
        if previous is None:
            raise IntegrityError("there is no previous version to return to", version=self.version, phase="activate")
        failed = self._current
        self._point_at(self._spare())
        if failed is not None:
            self._forget(failed)
        return previous

    def reverify(self, version: int, *, threads: int = 1) -> None:
        """Digest the committed `version` again. Raises IntegrityError naming the pieces that differ."""
        with open_committed(self.directory, version) as (manifest, view):
            verify(view.bytes.numpy(), manifest, threads=threads)

    def close(self) -> None:
        """Unmap and remove everything. Idempotent."""
        for view in (*self._views.values(), *self._writable.values()):
            view.close()
        self._views.clear()
        self._writable.clear()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._janitor.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> NodeArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spare(self) -> _Slot:
        """The slot that is not current; with one slot, that one."""
        return next((slot for slot in self._slots if slot is not self._current), self._slots[0])

    def _view(self, slot: _Slot) -> SlotView:
        if slot.path not in self._views:
            self._views[slot.path] = SlotView(slot.path, slot.layout, writable=False)
        return self._views[slot.path]

    @staticmethod
    def _forget(slot: _Slot) -> None:
        slot.version = slot.manifest = None
        slot.manifest_path.unlink(missing_ok=True)

    def _replace(self, slot: _Slot) -> None:
        for views in (self._views, self._writable):
            if view := views.pop(slot.path, None):
                view.close()
        slot.path.unlink(missing_ok=True)
        slot.manifest, slot.layout = None, self.layout
        stem = slot.path.name.partition(".")[0]
        slot.path = self.directory / f"{stem}.{self._generation}"
        self._generation += 1
        _allocate(slot.path, self.layout.nbytes)

    def _point_at(self, slot: _Slot) -> None:
        assert slot.version is not None  # callers have just set or checked it
        committed = Committed(slot.version, slot.path.name, slot.manifest_path.name)
        fresh = self.directory / "current.new"
        write_private(fresh, msgspec.msgpack.encode(committed))
        fresh.rename(self.directory / "current")
        self._current = slot


def require_name(key: str, name: str) -> None:
    """Raises ConfigError unless `name` is valid as a part of a directory's name."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{key}={name[: 2 * MAX_JOB_NAME]!r} must be 1 to {MAX_JOB_NAME} letters, digits, dots, dashes and "
            "underscores: it names a directory in shared memory"
        )


def require_free_bytes(shm_dir: Path, arena_nbytes: int, *, arenas: int = 1) -> None:
    """Raises ConfigError unless `shm_dir` has free memory for `arenas` of `arena_nbytes` each."""
    free, needed = free_nbytes(shm_dir), arenas * arena_nbytes
    if needed > free:
        who = "the node arena needs" if arenas == 1 else f"{arenas} node arenas on one host need"
        raise ConfigError(
            f"{who} {needed} bytes ({in_words(needed)}) of shared memory in {shm_dir} on {socket.gethostname()}; "
            f"{free} bytes ({in_words(free)}) are free. Free memory, enlarge the file system, "
            "or set checkpoint_engine.slots=1, which needs half"
        )


def _allocate(path: Path, nbytes: int) -> None:
    """A file whose pages exist: running out of memory is an error here, not a SIGBUS in a writer later."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, max(nbytes, 1))
    except OSError as exc:
        path.unlink()
        raise ConfigError(f"cannot reserve {nbytes} bytes of shared memory at {path}: {exc.strerror}") from exc
    finally:
        os.close(fd)


def _is_read_by_someone(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
