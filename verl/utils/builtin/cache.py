"""Directories that one process makes under a lock; they appear complete or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl import envs
from verl.utils.config import ConfigError

LOCK_TIMEOUT_S = 900.0


def cached_directory(name: str, recipe: Any, build: Callable[[Path], None]) -> Path:
    """The directory `<cache>/<name>-<hash of recipe>`, made by `build(empty directory)` if it is not there.

    Of several processes that call this at once, one builds and the others wait. `recipe` is a dataclass; each recipe
    has its own directory. Raises ConfigError if the cache cannot be written, or another builder does not end.
    """
    fingerprint = hashlib.sha256(json.dumps(dataclasses.asdict(recipe), sort_keys=True).encode()).hexdigest()[:12]
    root = envs.cache_dir()
    final = root / f"{name}-{fingerprint}"
    if not final.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            _build_locked(final, build)
        except OSError as exc:
            raise ConfigError(f"cannot make {final} ({exc}): set VERL_CACHE_DIR to a writable place with room") from exc
    return final


def _build_locked(final: Path, build: Callable[[Path], None]) -> None:
    import filelock

    partial = final.with_name(f".{final.name}.partial")
    try:
        with filelock.FileLock(final.with_name(f".{final.name}.lock"), timeout=LOCK_TIMEOUT_S):
            if final.is_dir():
                return
            shutil.rmtree(partial, ignore_errors=True)  # what a killed builder left; the lock is ours, so it is dead
            partial.mkdir()
            build(partial)
            os.rename(partial, final)
    except filelock.Timeout as exc:
        raise ConfigError(f"another process has been making {final} for {LOCK_TIMEOUT_S:.0f} s: stop it") from exc
