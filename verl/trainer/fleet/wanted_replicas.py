"""Reads the wanted number of rollout replicas from a file during a run."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from verl.checkpoint_engine.support.files import read_regular

logger = logging.getLogger(__name__)

MOST = 99_999
MOST_NBYTES = 64
_NUMBER = re.compile(rb"0*[1-9]\d{0,4}")


class WantedReplicas:
    """A file with one number, in the run's output directory, which its users may write during the run."""

    def __init__(self, path: Path) -> None:
        """Ignores the present content of `path`: it was meant for an earlier run in this directory."""
        self.path = path
        self._seen = self._read()

    def changed(self) -> int | None:
        """The number, if the file has changed since the last call, else None. Warns of any other content."""
        found = self._read()
        if found is None or found == self._seen:
            return None
        self._seen = found
        _, content = found
        if _NUMBER.fullmatch(content) is None:
            logger.warning("%s holds %.40r, not a number from 1 to %d: the rollout replicas stay", *self._told(content))
            return None
        return int(content)

    def _told(self, content: bytes) -> tuple[Path, str, int]:
        return self.path, content.decode(errors="replace"), MOST

    def _read(self) -> tuple[int, bytes] | None:
        """When it was written, and how it begins; None without any: then somebody may be about to write it."""
        try:
            written_ns, content = self.path.stat().st_mtime_ns, read_regular(self.path, MOST_NBYTES).strip()
        except FileNotFoundError:
            return None
        except OSError as exc:  # no file, or not ours to read
            return 0, str(exc).encode()
        return (written_ns, content) if content else None
