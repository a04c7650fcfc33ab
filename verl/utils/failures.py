"""Failures of a run that a sentence explains."""

from __future__ import annotations


class NamedFailure(Exception):
    """Ends a run. The message says what happened and what to do; commands show that alone, and the traceback with
    VERL_TRACEBACK=1."""


def in_one_line(failure: NamedFailure) -> str:
    """What it says. Ray hands on an error of another process as one whose text is that process' traceback."""
    while isinstance(cause := getattr(failure, "cause", None), NamedFailure):
        failure = cause
    return " ".join(str(failure).split())
