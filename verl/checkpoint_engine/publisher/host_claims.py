"""Whose a server of this host is, where its engine's workers know no writers: SGLang's.

A locked file beside the arenas, one for each port: the system lets go of it when its process ends, however that ends.
Publishers whose files are elsewhere (`VERL_SHM_DIR`), as those of another container, do not see each other.
"""

from __future__ import annotations

import fcntl
import os
import urllib.parse
import weakref
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError
from ..parameter_server.writers import RESCUE

PREFIX = "sglang-writer-"
_open: weakref.WeakSet[HostClaims] = weakref.WeakSet()


class _Anothers(Exception):
    def __init__(self, who: str) -> None:
        super().__init__(who)
        self.who = who

    @property
    def is_soon_done(self) -> bool:
        """Of a rescue, which may not have written its name yet."""
        return not self.who or self.who.startswith(RESCUE)


def _forget_all() -> None:
    for claims in list(_open):
        claims.forget()


os.register_at_fork(after_in_child=_forget_all)  # a DataLoader's worker outlives who has the claim


class HostClaims:
    """Of one publisher, on the host of its servers. Released when it is closed, or its process ends."""

    def __init__(self, shm_dir: Path) -> None:
        self._shm_dir = shm_dir
        self._files: dict[str, int] = {}
        _open.add(self)

    def claim(self, url: str, who: str, *, waits: bool = False) -> str | None:
        """Make the server at `url` this one's, if it is not yet: what tells it from others of this host. `who` it is,
        others are told.

        Raises ConfigError that says whose it is. `waits`: returns None instead while it is that of a rescue, which is
        soon done.
        """
        name = _name_of(url)
        while name not in self._files:
            try:
                file = os.open(self._shm_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as exc:
                raise ConfigError(f"the server at {url} cannot be claimed in {self._shm_dir}: {exc.strerror}") from exc
            try:
                is_taken = self._is_taken(file, name)
            except _Anothers as exc:
                if waits and exc.is_soon_done:
                    return None
                raise ConfigError(
                    f"the server at {url} is written by another: the {exc.who or f'process that has locked {name}'}. "
                    "Close that one first",
                    member=url,
                ) from None
            if is_taken:
                os.ftruncate(file, 0)
                os.pwrite(file, who.encode(), 0)
                self._files[name] = file
            else:
                os.close(file)
        return name

    def _is_taken(self, file: int, name: str) -> bool:
        """False if whoever had it has removed it until now. Raises _Anothers; `file` is closed then."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(file, 4096, 0).decode(errors="replace")
            os.close(file)
            raise _Anothers(who) from None
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._shm_dir / name), os.fstat(file))
        return False

    def release(self, url: str) -> None:
        """Others may write it. Idempotent."""
        if (file := self._files.pop(_name_of(url), None)) is not None:
            (self._shm_dir / _name_of(url)).unlink(missing_ok=True)
            os.close(file)

    def close(self) -> None:
        """Idempotent."""
        while self._files:
            name, file = self._files.popitem()
            (self._shm_dir / name).unlink(missing_ok=True)
            os.close(file)

    def forget(self) -> None:
        """In a fork, whose it is not."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def claim_path(shm_dir: Path, url: str) -> Path:
    """The file that is locked by whose the server at `url` is."""
    return shm_dir / _name_of(url)


def _name_of(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{PREFIX}{port}{parts.path.rstrip('/').replace('/', '_')}"
