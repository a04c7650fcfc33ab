"""What programs say on the terminal: log records as plain lines, and whether anything may move there."""

from __future__ import annotations

import logging
import sys

from rich.console import Console

from .package import PACKAGE


def log_to_console() -> None:
    """Show on stderr what the project reports (INFO and up) and what libraries warn about. Called as a program starts.

    A line is the bare message, behind `warning:` or `error:` where it is one. Every sync has its place in the line of
    its step, so the checkpoint engine is heard from WARNING on.
    """
    handler = _Stderr()
    handler.setFormatter(_Plain())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    project = PACKAGE.partition(".")[0]
    logging.getLogger(project).setLevel(logging.INFO)
    logging.getLogger(PACKAGE).setLevel(logging.WARNING)


def say(text: str) -> None:
    """A line on stderr."""
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
    """Whether cursor movement is welcome. rich alone would also say yes to a pipe when FORCE_COLOR is set."""
    return console.file.isatty() and not console.is_dumb_terminal
