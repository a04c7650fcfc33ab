"""`certify --faults`: faults in an update, and what becomes of the server.

Each cell begins with a server that serves one version. A pusher, a process of its own, pushes another version through a
relay; there the fault hits it. Then the state of the server is observed through its public routes, and the next update
is pushed without a fault.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import CheckpointEngineError, ConfigError, TransportError, TransportTimeout
from ..parameter_server.http_server import TEST_TIMEOUT_S
from . import damage
from .contract import GONE, MIXED, NEW, OLD, OUT, STUCK, cells
from .injection import STARTS_WITHIN_S, Injection, until
from .operators import operator_of
from .oracle import MARGIN, LogProbs, load_model, log_probs
from .pusher import Pusher
from .relay import Relay
from .routes import Pushed, Pushing, Route, route_of
from .sequence import Flown, Run
from .verdicts import Cell, Finding, Step

CALLS = 4
"""The deadline of a cell is this many times that of a call which is to pass its own."""
MOST_FILE_NBYTES = 2**16
RESTART = "restart the server"
Labels = dict[int, set[str | None]]
"""Version, 0 or 1, to the labels under which it may serve."""


@dataclass
class FaultRun(Run):
    """Every cell of one route."""

    route_name: str = ""
    sglang: bool = False
    """Whether the server is one of SGLang, else of vLLM."""
    dtype: str = "float32"
    scratch: Path = Path()
    deadline_s: float = 20.0
    """In which a pusher has to end, and then the server to serve or to refuse."""
    worker_pid: int | None = None
    only: Sequence[str] = ()
    """Names of faults; empty: all."""
    _serves: int = 0
    """0: A, 1: B."""
    _is_hit: bool = False
    """Whether a fault hits now."""
    _down: str = ""
    """The cell after which nothing could be tried."""

    def __post_init__(self) -> None:
        self._operator = operator_of(self.server.url, timeout_s=self.timeout_s, sglang=self.sglang)
        self._relay = Relay(self.server.url, timeout_s=self.timeout_s)  # a rescue uses it after its pusher's cell

    def close(self) -> None:
        """Close the relay. Idempotent."""
        self._relay.close()

    def all(self, tell: Callable[[str], None]) -> Iterator[Step]:
        """Every cell, as it ends. The server has A at the end, if it answers."""
        step = self.cold()
        yield step
        if not self.is_cold_a:
            tell(f"{self.not_cold_a(step)}: A is brought first")
            step.findings.clear()
            self._bring(0)
        asked = cells(self.route_name, with_worker=self.worker_pid is not None, only=self.only)
        for fault, phase, reason in asked:
            cell = Cell(name=f"{fault.name}, {phase}", fault=fault.name, phase=phase, skipped=reason)
            if not reason and self._down:
                cell.skipped = f"the server did not come back after {self._down}"
            if not cell.skipped:
                self.hit(cell)
            self.steps.append(cell)
            yield cell
        if not self._down and self._serves:
            self._bring(0)

    @property
    def may_have_b(self) -> bool:
        """Whether a pusher may have brought B."""
        return self._serves == 1 or self._is_hit

    def _bring(self, target: int) -> str:
        """Push without a fault. Returns the label. Raises CheckpointEngineError."""
        self.version += 1
        self._last = "AB"[target], Pushed(self._fresh(), self.directories[target], self.version)
        label = self._last[1].result(self.timeout_s)
        if label is None:
            raise TransportTimeout(f"the update did not end within {self.timeout_s:g} s")
        self._serves = target
        return label

    def _fresh(self) -> _ClosedRoute:
        return _ClosedRoute(
            partial(
                route_of,
                self.route_name,
                self._relay.url,  # by which a claim of a pusher that was killed is known
                timeout_s=self.timeout_s,
                pause_mode=self.pause_mode,
                sglang=self.sglang,
            )
        )

    def hit(self, cell: Cell) -> None:
        """Have the cell's fault hit an update, and write down what becomes of the server. Raises CheckpointEngineError
        if it could not be reached before."""
        before = self.server.label()
        self.version += 1
        target = 1 - self._serves
        labels: Labels = {self._serves: {before}, target: {str(self.version)}}
        flown: list[Flown] = []
        self._last = None  # a pusher of its own has ended when this run breaks off
        self._is_hit = True
        with ExitStack() as stack:
            directory, mark = self._damaged(cell, target)
            flight = stack.enter_context(ExitStack())
            self._relay.gate.clear()
            stack.callback(self._relay.gate.set)
            pusher = self._pusher(cell, directory)
            stack.callback(pusher.close)

            def push_too() -> Pusher:
                self.version += 1
                labels[1 - target].add(str(self.version))
                return self._pusher(None, self.directories[1 - target])

            hit = Injection(
                cell=cell,
                relay=self._relay,
                pusher=pusher,
                push_too=push_too,
                deadline_s=self.deadline_s,
                mark=mark,
                worker_pid=self.worker_pid or 0,
            )
            hit.arm()
            # A pusher that imports beside requests in flight takes long.
            until(lambda: self._relay.num_open > 0 or pusher.has_ended, STARTS_WITHIN_S)
            flight.enter_context(self.requests(flown))
            self._relay.gate.set()
            self._await_end(hit)
            self._settle(hit)
            if cell.state not in (OUT, GONE):
                flight.close()
                self._observe(cell, target, labels)
            self._next(cell, target)
        self._is_hit = False
        self._judge(cell, flown, target, labels)

    def _damaged(self, cell: Cell, target: int) -> tuple[Path, damage.Mark | None]:
        """The directory that the pusher gets, and a bit to flip in its memory."""
        directory = self.directories[target]
        if cell.fault == "half of the bytes":
            directory = damage.copied(directory, self.scratch / "damaged")
            damage.halve(directory)
        if cell.fault == "flipped bit":
            damaged = damage.copied(directory, self.scratch / "damaged")
            mark = damage.flip(damaged, partial(self._shows, self.oracle.of_new if target else self.oracle.of_old))
            return (damaged, None) if self.route_name == "disk" else (directory, mark)
        return directory, None

    def _shows(self, expected: LogProbs, directory: Path) -> bool:
        found = log_probs(load_model(directory, self.dtype), self.oracle.prompts)
        return self.tolerance.away(found, expected) > MARGIN * self.tolerance.nats

    def _pusher(self, cell: Cell | None, directory: Path) -> Pusher:
        """`cell`: of the pusher that the fault hits, None for another one."""
        fault = cell.fault if cell is not None else ""
        gives_up = fault in ("deadline passed", "late load", "worker stopped", "worker killed")
        return Pusher(
            self.route_name,
            self._relay.url,
            directory,
            self.version,
            timeout_s=self.deadline_s / CALLS if gives_up else self.timeout_s,
            pause_mode=self.pause_mode,
            sglang=self.sglang,
            most_file_nbytes=MOST_FILE_NBYTES if fault == "no space" else None,
        )

    def _await_end(self, hit: Injection) -> None:
        """Until the fault has hit, and the pusher has ended."""
        cell, pusher = hit.cell, hit.pusher
        try:
            until(lambda: hit.has_acted.is_set() or pusher.has_ended, STARTS_WITHIN_S + self.timeout_s)
            ended = pusher.result(self.deadline_s + (STARTS_WITHIN_S if cell.phase == "before" else 0))
        finally:
            hit.end()
        if ended is None:
            cell.ended = "not at all"
            text = f"the pusher did not end within {self.deadline_s:g} s of the fault"
            cell.findings.append(Finding(fault="hung", text=text))
            pusher.kill()
            return
        cell.ended, cell.error = ended.how, ended.error
        if not hit.has_hit:
            text = f"the update {ended.how} before the fault could hit it: {ended.error}"
            cell.findings.append(Finding(fault="refused", text=text))
        elif cell.fault == "second pusher":
            cell.ended += f", second {hit.second.how if hit.second is not None else 'not at all'}"
            cell.error = " / ".join(filter(None, (cell.error, hit.second.error if hit.second is not None else "")))

    def _settle(self, hit: Injection) -> None:
        """Until the server serves, or has not for the deadline. Sets `state` unless it serves."""
        until(lambda: hit.relay.num_open == 0, self.deadline_s)
        paused: bool | None = None

        def serves() -> bool:
            nonlocal paused
            try:
                paused = self._operator.is_paused()
            except TransportError:
                paused = None
            return paused is False

        until(serves, self.deadline_s)
        hit.cell.seconds = time.monotonic() - hit.began_s
        if paused is None:
            hit.cell.state, hit.cell.remedy = GONE, RESTART
        elif paused:
            self._resume(hit.cell)

    def _resume(self, cell: Cell) -> None:
        """A server that is paused, and would resume if it were requested, breaks a promise; one that refuses does
        not."""
        cell.state = STUCK
        try:
            self._operator.resume(max(self.deadline_s, TEST_TIMEOUT_S))
        except CheckpointEngineError as exc:
            cell.state, cell.error = OUT, cell.error or exc.message
            return
        resuming = self._operator.resuming
        text = f"it was still paused {cell.seconds:.0f} s after the fault, and {resuming} then resumed it"
        cell.findings.append(Finding(fault="paused for ever", text=text))
        cell.remedy = resuming

    def _observe(self, cell: Cell, target: int, labels: Labels) -> None:
        """Which version the server computes with."""
        try:
            found = self.probed()
            cell.label = self.server.label() or ""
        except CheckpointEngineError as exc:
            cell.findings.append(Finding(fault="mixed weights", text=f"it answers no probe: {exc}"))
            cell.state = cell.state or MIXED
            return
        cell.tokens = len(found)
        away = {}
        for version, expected in enumerate((self.oracle.of_old, self.oracle.of_new)):
            away[version] = self.tolerance.away(found, expected)
        serves = next((version for version, much in away.items() if much <= self.tolerance.nats), None)
        if serves is None:
            cell.state = cell.state or MIXED
            cell.deviation = min(away.values())
            text = f"{away[1 - target]:.3g} nats from the old version, {away[target]:.3g} from the new one"
            cell.findings.append(Finding(fault="mixed weights", text=text, prompt=self.oracle.prompts[0]))
            return
        cell.deviation = away[serves]
        if cell.state != STUCK:
            cell.state = NEW if serves == target else OLD
        if cell.label not in labels[serves]:
            text = f"it computes with the {'new' if serves == target else 'old'} version and reports {cell.label!r}"
            cell.findings.append(Finding(fault="wrong label", text=text))
        if cell.ended == "succeeded" and serves != target:
            text = "the pusher succeeded, and the old version serves"
            cell.findings.append(Finding(fault="not delivered", text=text))
        self._serves = serves

    def _next(self, cell: Cell, target: int) -> None:
        """The next update, of the version that is not served."""
        if cell.state == GONE:
            cell.next_update, self._down = "no", cell.name
            if cell.fault != "worker killed":
                text = "the server does not answer any more, and does not come back by itself"
                cell.findings.append(Finding(fault="server lost", text=text))
            return
        wanted = 1 - self._serves if cell.state in (OLD, NEW) else target
        try:
            self._require(wanted, self._bring(wanted))
            cell.next_update = "yes"
        except CheckpointEngineError as exc:
            cell.next_update = "no"
            cell.findings.append(Finding(fault="no way on", text=str(exc)))
            self._come_back(cell)

    def _require(self, version: int, label: str) -> None:
        """Raises TransportError unless the server computes with this version under this label."""
        found, expected = self.probed(), self.oracle.of_new if version else self.oracle.of_old
        if not self.tolerance.allows(found, expected):
            raise TransportError("the next update was answered, and the server does not compute with it")
        if self.route.labels and self.server.label() != label:
            raise TransportError(f"after the next update the server reports {self.server.label()!r}, not {label!r}")

    def _come_back(self, cell: Cell) -> None:
        """Another try, then the server's own load from disk. If neither helps, the server has to be restarted."""
        routes: dict[str, Callable[[], Pushing]] = {
            "one more update": self._fresh,
            "the server's own load from disk": partial(self._operator.disk, self.pause_mode),
        }
        for name, make in routes.items():
            with suppress(CheckpointEngineError):
                self.version += 1
                label = Pushed(make(), self.directories[0], self.version).result(self.timeout_s)
                self._serves = 0
                self._require(0, label or "")
                cell.remedy = name
                return
        cell.remedy, self._down = RESTART, cell.name

    def _judge(self, cell: Cell, flown: list[Flown], target: int, labels: Labels) -> None:
        """Look at the requests that were in flight."""
        cell.in_flight = len(flown)
        if cell.fault == "worker killed":
            return  # they are lost with it
        models = (self.oracle.old, self.oracle.new)
        for one in flown:
            if one.answer is None:
                fault = "hung" if one.is_late else "lost request"
                cell.findings.append(Finding(fault=fault, text=f"a request in flight: {one.error}", prompt=one.prompt))
                return
            if one.answer.aborted or self.pause_mode == "keep":
                continue
            of = [version for version, model in enumerate(models) if self.is_of(one.answer, model)]
            if not of:
                if not any(finding.fault == "mixed weights" for finding in cell.findings):
                    text = "a request in flight was answered by neither version"
                    cell.findings.append(Finding(fault="mixed versions", text=text, prompt=one.prompt))
                return
            if cell.fault != "second pusher" and target not in of and one.label in labels[target]:
                text = f"the server reported {one.label!r} before it answered with the old version"
                cell.findings.append(Finding(fault="wrong label", text=text, prompt=one.prompt))
                return


class _ClosedRoute:
    """A route that is closed after its only push, so that it claims nothing during a fault."""

    def __init__(self, make: Callable[[], Route]) -> None:
        self._make = make

    def push(self, directory: Path, version: int) -> str:
        route = self._make()
        try:
            return route.push(directory, version)
        finally:
            route.close()


def require_process(pid: int) -> None:
    """Raises ConfigError unless it is a process that this user may stop."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError as exc:
        raise ConfigError(f"--worker-pid {pid}: there is no such process on this host") from exc
    except PermissionError as exc:
        raise ConfigError(f"--worker-pid {pid}: it belongs to another user") from exc
