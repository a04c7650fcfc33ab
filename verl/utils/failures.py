"""Failures of a run that one sentence explains."""

from __future__ import annotations


class NamedFailure(Exception):
    """Ends a run. The message states what happened and the remedy; commands show only that, and the traceback with
    VERL_TRACEBACK=1."""

    def told(self) -> str:
        return str(self)


def in_one_line(failure: NamedFailure) -> str:
    """The failure's own message. Ray wraps an error of another process in one whose text is a traceback."""
    while isinstance(cause := getattr(failure, "cause", None), NamedFailure):
        failure = cause
    return " ".join(failure.told().split())
