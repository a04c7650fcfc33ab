"""Output of programs on the terminal: log records as plain lines, and whether progress bars may be drawn."""

from __future__ import annotations

import logging
import sys

from rich.console import Console

from .package import PACKAGE


def log_to_console() -> None:
    """Log to stderr: the project from INFO on, libraries from WARNING on. Called as a program starts.

    A line is the bare message, after `warning:` or `error:` for such records. The checkpoint engine logs from WARNING
    on, because the line of a training step reports its sync.
    """
    handler = _Stderr()
    handler.setFormatter(_Plain())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    project = PACKAGE.partition(".")[0]
    logging.getLogger(project).setLevel(logging.INFO)
    logging.getLogger(PACKAGE).setLevel(logging.WARNING)


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(text + "\n")


class _Stderr(logging.Handler):
    """stderr as it is at the time of each record: a progress bar takes its place while it is up."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - as every handler of the logging package does
            self.handleError(record)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def is_live(console: Console) -> bool:
    """Whether `console` is a terminal that can move the cursor. rich itself also accepts a pipe with FORCE_COLOR."""
    return console.file.isatty() and not console.is_dumb_terminal
