"""Errors between the driver and a worker group.

WorkerGroupError
├── PlacementError       the cluster lacks the resources; names needed and available ones
├── WorkerFailed         a method raised on a rank; carries the worker's traceback
├── WorkerDied           a worker's process ended; the group's other workers have been killed
├── WorkerTimeout        a deadline of the caller passed (also a TimeoutError); says which ranks are not done
└── WorkerGroupClosed    the group was shut down, or is unusable after an earlier failure

When a method raises, the caller gets the original exception, with the `WorkerFailed` as its `__cause__`; if the
original cannot be pickled, the caller gets the `WorkerFailed` itself. Mistakes of the caller (sizes that do not divide,
unknown methods) raise ValueError, TypeError or AttributeError on the driver.
"""

from __future__ import annotations

from typing import Any

from verl.utils.failures import NamedFailure


class WorkerGroupError(Exception):
    """Base of the tree. `group` is the name of the worker group; `rank` is None if the error concerns several ranks."""

    def __init__(self, message: str, *, group: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle keyword-only arguments, too: errors travel between processes."""
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[WorkerGroupError], args: tuple[Any, ...], state: dict[str, Any]) -> WorkerGroupError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class PlacementError(WorkerGroupError):
    pass


class WorkerFailed(WorkerGroupError):
    """`traceback` is the worker's, as text; `pickled` is the original exception, or None if it cannot be pickled."""

    def __init__(
        self, message: str, *, group: str, rank: int | None = None, traceback: str = "", pickled: bytes | None = None
    ) -> None:
        super().__init__(message, group=group, rank=rank)
        self.traceback = traceback
        self.pickled = pickled

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.traceback.rstrip()}" if self.traceback else super().__str__()


class WorkerDied(WorkerGroupError, NamedFailure):
    """`pid` and `node` (an IP address) are those of the dead process, or None if it never started."""

    def told(self) -> str:
        """With its notes: where the process wrote its log."""
        return "; ".join([str(self), *getattr(self, "__notes__", ())])

    def __init__(
        self, message: str, *, group: str, rank: int | None = None, pid: int | None = None, node: str | None = None
    ) -> None:
        super().__init__(message, group=group, rank=rank)
        self.pid = pid
        self.node = node


class WorkerTimeout(WorkerGroupError, TimeoutError):
    pass


class WorkerGroupClosed(WorkerGroupError):
    pass
