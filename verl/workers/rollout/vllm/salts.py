"""Names of KV caches, so that blocks of one version are found only by the requests that began with it."""

from __future__ import annotations

import uuid

from verl.workers.rollout.records import NO_VERSION


class Salts:
    """Salts for vLLM's prefix cache, for `rollout.kv_across_versions=salt` and `keep`.

    vLLM hashes a request's salt into its first block, and every block into the next: requests with different salts
    share no block. A salt names the engine process, one activation, and its version. A version's number alone would not
    do: a run that goes back to a checkpoint gives the same number to other weights.
    """

    def __init__(self) -> None:
        self._engine = uuid.uuid4().hex[:8]
        self._activation = 0
        self._cleared_at = 0
        """The first activation whose blocks may still be cached."""
        self._version = NO_VERSION

    def outdated_by(self, version: int, *, loaded_since: int | None) -> bool:
        """Whether cached blocks must go before `version` serves, which follows `loaded_since` (None: unknown).

        A newer version leaves them to those that began with them. After a failed load, a sleep, or a return to an
        older step they belong to weights that nobody counts any more.
        """
        return loaded_since is None or version <= loaded_since

    def activated(self, version: int) -> None:
        self._activation += 1
        self._version = version

    def cleared(self) -> None:
        """No block is cached any more, whatever its salt."""
        self._cleared_at = self._activation

    @property
    def current(self) -> str:
        """That of conversations that begin now."""
        return f"{self._engine}/{self._activation}/{self._version}"

    def of(self, asked: str | None) -> str:
        """The salt for a request whose conversation has `asked`; the current one if that has no blocks here."""
        if asked is not None:
            engine, activation, _ = asked.split("/")
            if engine == self._engine and int(activation) >= self._cleared_at:
                return asked
        return self.current


def version_of(salt: str) -> int:
    """The version that served when `salt` was made: no block with it was computed with older weights."""
    return int(salt.rpartition("/")[2])
