"""How a run is told, while it goes on, that it should have more or fewer rollout replicas."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


class WantedReplicas:
    """A file with one number, which anybody who may write into the run's output directory may write or replace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, str] | None = None

    def changed(self) -> int | None:
        """The number, if the file was written since the last time; None if not. Anything else in it is a warning."""
        try:
            written_ns, content = self.path.stat().st_mtime_ns, self.path.read_text().strip()
        except FileNotFoundError:
            return None
        if (written_ns, content) == self._seen or not content:  # empty: somebody is about to write it
            return None
        self._seen = written_ns, content
        if not (content.isdecimal() and int(content) >= 1):
            logger.warning("%s holds %.40r, not a number of at least 1: the rollout replicas stay", self.path, content)
            return None
        return int(content)
