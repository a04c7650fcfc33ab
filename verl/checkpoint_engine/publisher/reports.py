"""Directories on the host of an SGLang server, in which its ranks answer orders: see `engines.sglang.orders`."""

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
"""Calls to a `verl-sync node` on the host."""
METHODS_BY_CALL = {MAKE: "make", TAKE: "take", CLAIM: "claim", RELEASE: "release"}
"""Calls to methods of `Reports`."""


class Reports(Protocol):
    """Reports of SGLang ranks on one host, and claims of its servers. Every method raises ActivationError."""

    async def make(self) -> str:
        """Make a directory for the answers to one order. A late answer then never counts for the next order."""
        ...

    async def take(self, directory: str) -> dict[int, bytes]:
        """Return the answer of each rank in `directory`, and remove it."""
        ...

    async def claim(self, url: str, who: str) -> str:
        """As `HostClaims.claim`, on that host; waits for a rescue to end. Raises ConfigError, TransportError."""
        ...

    async def release(self, url: str) -> None: ...


class ReportsHere:
    """`Reports` of this host, in directories beside its arenas. A janitor removes them when this process ends."""

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
        """Remove answers that were not taken, and release all claims. Idempotent."""
        self._claims.close()
        if self._janitor is not None:
            self._janitor.close()
        self._root = self._janitor = None
        self._made.clear()
