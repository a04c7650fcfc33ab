"""Directories in which the ranks of an SGLang server answer, on its host: see `engines.sglang.orders`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Protocol

from ..engines.sglang.orders import read_reports
from ..errors import ActivationError
from ..memory.janitor import Janitor
from ..parameter_server.endpoints import AGAIN_S
from ..parameter_server.writers import LEASE_S
from .host_claims import HostClaims

PREFIX = "sglang-reports-"
MAKE, TAKE, CLAIM, RELEASE = "make_reports", "take_reports", "claim", "release"
"""What a process that holds nodes is asked for."""
METHODS_BY_CALL = {MAKE: "make", TAKE: "take", CLAIM: "claim", RELEASE: "release"}
"""Of `Reports`."""


class Reports(Protocol):
    """Of one host. Every method raises ActivationError."""

    async def make(self) -> str:
        """A new directory there, for the answers to one order: a rank that answers late does not answer the next."""
        ...

    async def take(self, directory: str) -> dict[int, bytes]:
        """What each rank has written into `directory`, which is removed."""
        ...

    async def claim(self, url: str, who: str) -> str:
        """As `HostClaims.claim`, on that host. Waits for a rescue that has it. Raises ConfigError, TransportError."""
        ...

    async def release(self, url: str) -> None: ...


class ReportsHere:
    """Of this host, beside its arenas: whoever maps those sees them. Removed with this process, however it ends."""

    def __init__(self, shm_dir: Path) -> None:
        self._shm_dir = shm_dir
        self._root: Path | None = None
        self._janitor: Janitor | None = None
        self._made: set[str] = set()
        self._claims = HostClaims(shm_dir)

    async def make(self) -> str:
        try:
            if self._root is None:
                self._root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._shm_dir))
                self._janitor = Janitor(self._root)
            directory = tempfile.mkdtemp(dir=self._root)
        except OSError as exc:
            raise ActivationError(f"no directory can be made for the answers of SGLang's ranks: {exc}") from exc
        self._made.add(directory)
        return directory

    async def take(self, directory: str) -> dict[int, bytes]:
        if directory not in self._made:
            raise ActivationError(f"no answers of SGLang's ranks were requested in {directory}")
        self._made.remove(directory)
        try:
            return read_reports(Path(directory))
        except (OSError, ValueError) as exc:
            raise ActivationError(f"the answers of SGLang's ranks cannot be read: {exc}") from exc
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def claim(self, url: str, who: str) -> str:
        deadline_s = time.monotonic() + LEASE_S
        while True:
            name = self._claims.claim(url, who, waits=time.monotonic() < deadline_s)
            if name is not None:
                return name
            await asyncio.sleep(AGAIN_S)

    async def release(self, url: str) -> None:
        self._claims.release(url)

    def close(self) -> None:
        """Remove what was not taken. Idempotent."""
        self._claims.close()
        if self._janitor is not None:
            self._janitor.close()
        self._root = self._janitor = None
        self._made.clear()
