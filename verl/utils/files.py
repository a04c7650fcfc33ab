"""Making sure that files are there."""

from __future__ import annotations

import os
from pathlib import Path


def sync_to_disk(directory: Path) -> None:
    """The files directly in `directory`, and their names, survive a power failure when this returns."""
    for path in [*directory.iterdir(), directory]:
        if path.is_file() or path == directory:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
