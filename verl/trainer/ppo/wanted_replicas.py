"""How a run is told, while it goes on, that it should have more or fewer rollout replicas."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


class WantedReplicas:
    """A file with one number, which anybody who may write into the run's output directory may write or replace."""

    def __init__(self, path: Path) -> None:
        """What `path` holds by now was meant for another run in this directory."""
        self.path = path
        self._seen = self._read()

    def changed(self) -> int | None:
        """The number, if the file was written since the last time; None if not. Anything else in it is a warning."""
        found = self._read()
        if found is None or found == self._seen:
            return None
        self._seen = found
        _, content = found
        if not (content.isdecimal() and int(content) >= 1):
            logger.warning("%s holds %.40r, not a number of at least 1: the rollout replicas stay", self.path, content)
            return None
        return int(content)

    def _read(self) -> tuple[int, str] | None:
        """When it was written, and its content; None without any: then somebody may be about to write it."""
        try:
            written_ns, content = self.path.stat().st_mtime_ns, self.path.read_text().strip()
        except FileNotFoundError:
            return None
        return (written_ns, content) if content else None
