"""One run at a time writes to an output directory: two would replace each other's checkpoints and mix their metrics."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import psutil

from verl.utils.config import ConfigError

logger = logging.getLogger(__name__)

NAME = ".running"
_HELD = (errno.EACCES, errno.EAGAIN)


@contextmanager
def only_run_in(directory: Path) -> Iterator[None]:
    """Lock `directory` during a run that writes to it. Called on the driver.

    The operating system's lock (fcntl, also on NFS) ends with its process. Its file names the owner. Raises ConfigError
    naming the other run.
    """
    path = directory / NAME
    with _opened(path) as file:
        if file is not None:
            file.truncate(0)
            json.dump(
                {
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "since": f"{datetime.now(tz=UTC):%Y-%m-%d %H:%M UTC}",
                },
                file,
            )
            file.flush()
        try:
            yield
        finally:
            if file is not None:
                path.unlink(missing_ok=True)


def is_written(directory: Path) -> bool:
    """Whether a run writes to `directory`. True, too, for a run killed on another host, whose file remains."""
    try:
        owner = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:  # it is being written
        return True
    return bool(owner["host"] != socket.gethostname() or psutil.pid_exists(owner["pid"]))


@contextmanager
def _opened(path: Path) -> Iterator[TextIO | None]:
    """The file, locked; None where the file system has no locks."""
    while True:
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                if exc.errno in _HELD:
                    raise ConfigError(_told(path, file)) from exc
                logger.warning("%s cannot be locked (%s): make sure that no other run writes there", path, exc.strerror)
                yield None
                return
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # not removed by whoever had it until now
                    yield file
                    return


def _told(path: Path, file: TextIO) -> str:
    file.seek(0)
    try:
        owner = json.load(file)
        who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        who = "it does not say which"
    return (
        f"another run is writing to {path.parent} ({who}): give this one another trainer.experiment_name, "
        "or end that one first"
    )
