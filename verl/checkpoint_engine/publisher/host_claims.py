"""Claims of servers of this host whose engine has no notion of writers: SGLang's.

A claim is a locked file beside the arenas, one per port. The kernel unlocks it when the publisher's process ends, even
if killed. Publishers with another `VERL_SHM_DIR`, for instance in another container, do not see each other's claims.
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
    """The claims of one publisher on servers of this host. They end with `close`, or with this process."""

    def __init__(self, shm_dir: Path) -> None:
        self._shm_dir = shm_dir
        self._files: dict[str, int] = {}
        _open.add(self)

    def claim(self, url: str, who: str, *, waits: bool = False) -> str | None:
        """Claim the server at `url`, unless it is claimed already. Returns its name, unique on this host. `who`: this
        publisher, for the errors of others.

        Raises ConfigError naming another owner. With `waits` it returns None instead while the owner is a rescue, which
        ends soon.
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
        """Release the claim on the server at `url`. Idempotent."""
        if (file := self._files.pop(_name_of(url), None)) is not None:
            (self._shm_dir / _name_of(url)).unlink(missing_ok=True)
            os.close(file)

    def close(self) -> None:
        """Release all claims. Idempotent."""
        while self._files:
            name, file = self._files.popitem()
            (self._shm_dir / name).unlink(missing_ok=True)
            os.close(file)

    def forget(self) -> None:
        """Drop all claims in a fork of this process, without releasing them."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def claim_path(shm_dir: Path, url: str) -> Path:
    """The file that the owner of the server at `url` locks."""
    return shm_dir / _name_of(url)


def _name_of(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{PREFIX}{port}{parts.path.rstrip('/').replace('/', '_')}"
