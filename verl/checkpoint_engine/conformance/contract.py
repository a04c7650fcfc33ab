"""The recovery contract: which faults hit an update in which phase, and in which states it may end. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PHASES = {
    "before": "nothing has been requested",
    "paused": "the server has paused; the load has not been requested",
    "loading": "the load has been requested, and not been answered",
    "loaded": "the server has answered the load; the pusher has not got the answer",
    "resuming": "the pusher has requested to resume; the server has not got the request",
}
OLD, NEW, OUT = "old", "new", "out"
MIXED, STUCK, GONE = "mixed", "paused", "gone"
STATES = {
    OLD: "the old version serves",
    NEW: "the new version serves",
    OUT: "out of service: the server refuses to resume, and gives the reason",
    GONE: "out of service: the server does not answer",
    MIXED: "it serves, with neither version",
    STUCK: "it is paused, and would resume if it were requested: nobody does",
}
PROMISES = {
    "deadline": "A pusher that lives ends within its deadline, with the version served or an error.",
    "state": "The server then serves the old version or the new one, or is out of service and gives the reason.",
    "pause": "No server stays paused that could serve.",
    "answers": "Every request in flight is answered, by one version.",
    "label": "The label is that of the version that the server computes with.",
    "next": "The next update works.",
}
"""What a route promises, by the word that names it. `BROKEN` has the faults that break each."""
BROKEN = {
    "deadline": ("hung",),
    "state": ("mixed weights", "refused"),
    "pause": ("paused for ever",),
    "answers": ("mixed versions", "lost request"),
    "label": ("wrong label",),
    "next": ("no way on", "server lost"),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the phases in which it has a meaning."""

    name: str
    meaning: str
    phases: tuple[str, ...]
    not_for: Mapping[str, str]
    """Route to the reason why it has no such fault."""


AT_ALL = ("paused", "loading", "loaded", "resuming")
INJECTED = (
    Fault(name="pusher killed", meaning="its process gets SIGKILL", phases=AT_ALL, not_for={}),
    Fault(name="connection lost", meaning="the connection of the request is reset, once", phases=AT_ALL, not_for={}),
    Fault(
        name="network down",
        meaning="every connection between pusher and server is reset until the pusher has ended",
        phases=("loading",),
        not_for={},
    ),
    Fault(
        name="deadline passed",
        meaning="the server's answer arrives after the pusher's deadline",
        phases=("loaded",),
        not_for={},
    ),
    Fault(
        name="late load",
        meaning="the load reaches the server after the pusher's deadline",
        phases=("paused",),
        not_for={},
    ),
    Fault(
        name="flipped bit",
        meaning="one bit of one weight: in the file (`disk`), or in memory between checks and the load (others)",
        phases=("before",),
        not_for={},
    ),
    Fault(
        name="no space",
        meaning="the pusher cannot enlarge a file or shared memory (RLIMIT_FSIZE)",
        phases=("before",),
        not_for={
            "disk": "the route writes no file; one that is cut off is `half of the bytes`",
            "distributed": "the route writes no file and no shared memory",
        },
    ),
    Fault(
        name="second pusher",
        meaning="another process pushes the old version under a label of its own, and the first one then goes on",
        phases=("paused", "loaded"),
        not_for={},
    ),
    Fault(
        name="half of the bytes",
        meaning="a file ends in its middle",
        phases=("before",),
        not_for={"arena": "it reads no file, and requests nothing before all bytes are verified"},
    ),
    Fault(
        name="worker stopped",
        meaning="the server's process gets SIGSTOP, and SIGCONT after the pusher has ended",
        phases=("loading",),
        not_for={},
    ),
    Fault(name="worker killed", meaning="the server's process gets SIGKILL", phases=("loading",), not_for={}),
)


def cells(route: str, *, with_worker: bool, only: Sequence[str] = ()) -> list[tuple[Fault, str, str]]:
    """(fault, phase, why it is not tried, or empty) of each cell of a route, in the order of a run. `only`: names of
    faults; empty: all."""
    found = []
    for fault in INJECTED:
        if only and fault.name not in only:
            continue
        reason = fault.not_for.get(route, "")
        if fault.name.startswith("worker") and not with_worker:
            reason = "no process was given with --worker-pid"
        found += [(fault, phase, reason) for phase in fault.phases]
    return found
