"""Results of probes, kept on disk for later runs.

A result is stored under the digest of all that it depends on: the question, the versions of torch and transformers, and
our sources. Files are written atomically, so any number of processes may write the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from verl import envs

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
SOURCES = (_HERE, _HERE.parent / "rollout" / "hf", _HERE.parents[1] / "compat" / "transformers.py")
"""Our source files that results depend on; of a directory, all modules."""


def digest_of(question: str) -> str:
    return hashlib.sha256(f"{question}\n{_asked_by()}".encode()).hexdigest()


@cache
def _asked_by() -> str:
    found = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for source in SOURCES:
        for file in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            found.update(file.read_bytes())
    return found.hexdigest()


def read(digest: str) -> dict[str, Any] | None:
    """The result under `digest`; None if there is none, or it cannot be read."""
    try:
        found = json.loads(_file(digest).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(digest: str, answer: dict[str, Any]) -> None:
    """Write a result. If no directory is writable, the next run probes again."""
    file = _file(digest)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{digest[:12]}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                json.dump(answer, opened)
            os.replace(partial, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as exc:
        logger.debug("the answer of a probe is not kept: %s", exc)


def _file(digest: str) -> Path:
    return envs.cache_dir() / "probes" / f"{digest}.json"
