"""Ray, as a run uses it: started with the run unless there is one already, and ended with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from verl.utils.config import ConfigError
from verl.utils.signals import sigterm_handler_kept

logger = logging.getLogger(__name__)


class RaySession:
    """Lives on the driver."""

    def __init__(self, *, timeline: str | None = None) -> None:
        """`timeline` is where `close` writes what Ray recorded, for chrome://tracing or Perfetto."""
        self._timeline = timeline
        self._owned = False
        self._log_dir: Path | None = None

    def start(self, arguments: Mapping[str, Any]) -> None:
        """`arguments` of `ray.init` go before ours. Does nothing if this process is connected to a Ray."""
        if ray.is_initialized():
            return
        logger.info("starting Ray")
        self._owned = True
        ours: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            # Errors reach the driver as exceptions. What libraries print in a dozen processes stays in Ray's log files.
            "log_to_driver": False,
            "logging_level": "error",
        }
        with sigterm_handler_kept():
            context: Any = ray.init(**(ours | dict(arguments)))
        session = getattr(context, "address_info", {}).get("session_dir")
        self._log_dir = Path(session) / "logs" if session else None

    def add_note(self, error: BaseException) -> None:
        """Say where the processes' own words are."""
        if self._log_dir is not None and isinstance(error, Exception) and not isinstance(error, ConfigError):
            error.add_note(f"the processes of this run wrote their logs to {self._log_dir}")

    def close(self) -> None:
        """Idempotent."""
        if self._timeline and ray.is_initialized():
            ray.timeline(filename=self._timeline)
            self._timeline = None
        if self._owned:
            self._owned = False
            ray.shutdown()
