"""The shared key of a publisher and the rollout nodes on other hosts: a file, the same on all hosts."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ..errors import ConfigError

LEAST_LENGTH = 32


def make_key(file: Path) -> bool:
    """Write a new key into `file`, which only this user may read; False if the file exists. Raises ConfigError."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as made:
                made.write(secrets.token_hex(LEAST_LENGTH) + "\n")
        except OSError:
            file.unlink(missing_ok=True)
            raise
    except FileExistsError:
        return False
    except OSError as exc:
        raise ConfigError(f"the key file {file} cannot be made: {exc.strerror}") from exc
    return True


def key_in(file: Path) -> bytes:
    """Read the key. Raises ConfigError if the file is missing, readable by others, or too short for a secret."""
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"others may read the key file {file}: chmod 600 {file}")
        key = file.read_bytes().strip()
    except OSError as exc:
        raise ConfigError(f"the key file {file} cannot be read: {exc.strerror}") from exc
    if len(key) < LEAST_LENGTH:
        raise ConfigError(f"the key in {file} has {len(key)} characters, fewer than {LEAST_LENGTH}")
    return key
