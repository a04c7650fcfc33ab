"""Compare the digest of the weights that an engine loaded with that of the pushed ones."""

from __future__ import annotations

from ..errors import ActivationError
from ..memory.committed import committed_digest


def require_digest(arena_path: str, version: int, loaded: str) -> None:
    """Raises ActivationError if `loaded` is not the digest of `version` in the arena, which may be on another host."""
    digest = committed_digest(arena_path, version)
    if digest is not None and loaded != digest:
        raise ActivationError(
            f"its workers loaded other weights as version {version} than the pushed ones (digest {loaded}, not "
            f"{digest})",
            version=version,
            phase="activate",
        )
