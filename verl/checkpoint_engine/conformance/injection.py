"""One fault in one update: at which request to the server it hits, and what it does. No torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import damage
from .pusher import Ended, Pusher
from .relay import Exchange, Moment, Relay
from .verdicts import Cell

POLL_S = 0.05
STARTS_WITHIN_S = 60.0
"""For a pusher's process to import what it needs."""
IN_THE_LOAD_S = 0.3
"""Between the request of a load and a SIGKILL in its middle."""


@dataclass
class Injection:
    """A pusher's process, and the relay in which the fault waits for it."""

    cell: Cell
    relay: Relay
    pusher: Pusher
    push_too: Callable[[], Pusher]
    """Starts a second pusher."""
    deadline_s: float
    mark: damage.Mark | None = None
    """Of a bit to flip in memory."""
    worker_pid: int = 0
    second: Ended | None = None
    """The end of the second pusher, or None: there was none, or it did not end."""
    began_s: float = field(default_factory=time.monotonic)
    """When the fault hit, by the monotonic clock."""
    has_hit: bool = False
    has_acted: threading.Event = field(default_factory=threading.Event)
    """Set once the action of the fault is over."""

    def arm(self) -> None:
        """Set the trap. Faults of the version's files have hit before."""
        plan = PLANS.get((self.cell.fault, self.cell.phase))
        if plan is None or (self.cell.fault == "flipped bit" and self.mark is None):
            self.has_hit = True
            self.has_acted.set()
            return
        what, moment, act = plan

        def acted(exchange: Exchange) -> None:
            self.has_hit, self.began_s = True, time.monotonic()
            act(self, exchange)

        def set_trap(_: Exchange | None = None) -> None:
            self.has_acted = self.relay.trap(what, moment, acted)

        if what == "resume":  # of the load, not of a question before it
            self.has_acted = self.relay.trap("load", "answered", set_trap)
        else:
            set_trap()

    def end(self) -> None:
        """Let go of what the fault still holds."""
        self.relay.is_down = False
        if self.worker_pid:
            with suppress(ProcessLookupError):
                os.kill(self.worker_pid, signal.SIGCONT)

    def kill(self, exchange: Exchange) -> None:
        self.pusher.kill()
        exchange.is_cut = True

    def kill_in_the_load(self, _: Exchange) -> None:
        """It is stopped before the load is requested, so that no byte of its memory moves before it dies."""
        self.pusher.stop()
        threading.Timer(IN_THE_LOAD_S, self.pusher.kill).start()

    def cut(self, exchange: Exchange) -> None:
        exchange.is_cut = True

    def take_down(self, _: Exchange) -> None:
        self.relay.is_down = True

    def wait_for_end(self, _: Exchange) -> None:
        """Until the pusher has given up, and its process has ended."""
        until(lambda: self.pusher.has_ended, self.deadline_s)

    def flip_in_memory(self, exchange: Exchange) -> None:
        assert self.mark is not None
        if damage.flip_in_memory(self._memory(exchange), self.mark):
            return
        if not exchange.ends_load:  # perhaps it is in a later part
            self.has_acted = self.relay.trap("load", "arrived", self.flip_in_memory)
            return
        self.cell.skipped = "the bytes were not found in the pusher's memory"

    def _memory(self, exchange: Exchange) -> list[Path]:
        arena_path = exchange.arena_path
        return damage.arena_slots(arena_path) if arena_path else self.pusher.files()

    def push_second(self, _: Exchange) -> None:
        pusher = self.push_too()
        try:
            self.second = pusher.result(STARTS_WITHIN_S + self.deadline_s)
        finally:
            pusher.close()
        self.began_s = time.monotonic()

    def stop_worker(self, _: Exchange) -> None:
        os.kill(self.worker_pid, signal.SIGSTOP)

    def kill_worker(self, _: Exchange) -> None:
        os.kill(self.worker_pid, signal.SIGKILL)


PLANS: dict[tuple[str, str], tuple[str, Moment, Callable[[Injection, Exchange], None]]] = {
    ("pusher killed", "paused"): ("pause", "answered", Injection.kill),
    ("pusher killed", "loading"): ("load", "arrived", Injection.kill_in_the_load),
    ("pusher killed", "loaded"): ("load", "answered", Injection.kill),
    ("pusher killed", "resuming"): ("resume", "arrived", Injection.kill),
    ("connection lost", "paused"): ("pause", "answered", Injection.cut),
    ("connection lost", "loading"): ("load", "sent", Injection.cut),
    ("connection lost", "loaded"): ("load", "answered", Injection.cut),
    ("connection lost", "resuming"): ("resume", "arrived", Injection.cut),
    ("network down", "loading"): ("load", "sent", Injection.take_down),
    ("deadline passed", "loaded"): ("load", "answered", Injection.wait_for_end),
    ("late load", "paused"): ("load", "arrived", Injection.wait_for_end),
    ("flipped bit", "before"): ("load", "arrived", Injection.flip_in_memory),
    ("second pusher", "paused"): ("load", "arrived", Injection.push_second),
    ("second pusher", "loaded"): ("load", "answered", Injection.push_second),
    ("worker stopped", "loading"): ("load", "arrived", Injection.stop_worker),
    ("worker killed", "loading"): ("load", "sent", Injection.kill_worker),
}
"""(fault, phase) to (request, moment, action)."""


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
