"""`--level full`: what updates are tried together with, after the sequence of `quick`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..errors import CheckpointEngineError, ConfigError
from .adapters import AdapterRun
from .routes import PAUSE_MODES
from .sequence import NUM_TOKENS, Beside, Run
from .verdicts import Finding, Step

LEAVES_AFTER_S = (0.02, 0.05, 0.1, 0.2)
"""One after the other: clients leave while their prompt is read, while they are answered, and while they wait."""


def full(run: Run, on_top: Callable[[], Beside]) -> Iterator[Step]:
    """Every step, as it ends, and at last version A. `on_top` makes that of an adapter; it raises ConfigError with the
    reason if there is none."""
    for level in (1, 2):
        yield _tried(run, f"after sleep {level}", partial(_slept, run, level))
    yield _tried(run, "clients leave", Leaving)
    for mode in PAUSE_MODES:
        if mode != run.pause_mode:
            yield in_mode(run, mode)
    yield _tried(run, "adapter on top", on_top)
    if run.may_have_b:
        yield run.warm("A", name="at last")


def _tried(run: Run, name: str, make: Callable[[], Beside]) -> Step:
    try:
        beside = make()
    except ConfigError as exc:
        return run.not_tried(name, exc.message)
    return run.warm("A" if run.may_have_b else "B", name=name, beside=beside, in_flight=beside.in_flight)


def in_mode(run: Run, mode: str) -> Step:
    name, before = f"pause mode {mode}", run.pause_mode
    if mode not in run.route.pause_modes:
        return run.not_tried(name, "the server, or its route, has no such mode")
    run.pause_mode = run.route.pause_mode = mode
    try:
        return _tried(run, name, Beside)
    finally:
        run.pause_mode = run.route.pause_mode = before


def _slept(run: Run, level: int) -> Slept:
    """Raises ConfigError."""
    if level > 1 and isinstance(run, AdapterRun):
        raise ConfigError("an adapter does not bring the weights of its base")
    run.server.check_sleep(level)
    return Slept(level)


class Slept(Beside):
    """The server has slept, and is awake again. After level 2 it has no weights: the update has to bring all."""

    def __init__(self, level: int) -> None:
        self._level = level
        self.in_flight = level == 1

    def before(self, run: Run, step: Step) -> None:
        run.server.sleep(self._level)
        run.server.wake_up()
        if self._level > 1 and self._has_weights(run):
            step.note = "the server kept its weights: whether the update brings all of them was not seen"

    @staticmethod
    def _has_weights(run: Run) -> bool:
        try:
            found = run.probed()
        except (CheckpointEngineError, TypeError):  # no number, or none that JSON has
            return False
        expected = run.oracle.of_new if run.may_have_b else run.oracle.of_old
        return run.tolerance.allows(found, expected)


class Leaving(Beside):
    """Clients that close their connections before they are answered."""

    def __init__(self, leaves_after_s: Sequence[float] = LEAVES_AFTER_S) -> None:
        self._leaves_after_s = leaves_after_s
        self._prompts: list[Sequence[int]] = []

    @contextmanager
    def during(self, run: Run) -> Iterator[None]:
        ends, has_left = threading.Event(), threading.Event()
        errors: list[str] = []

        def leave() -> None:
            try:
                for number, after_s in enumerate(itertools.cycle(self._leaves_after_s)):
                    at = 1 + number % (len(run.long_prompt) - 1)
                    prompt = [*run.long_prompt[at:], *run.long_prompt[:at]]
                    if run.server.leave(prompt, _room(run, prompt), after_s):
                        self._prompts.append(prompt)
                    has_left.set()
                    if ends.is_set():
                        return
            except CheckpointEngineError as exc:
                errors.append(str(exc))
            finally:
                has_left.set()

        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        has_left.wait()
        try:
            yield
        finally:
            ends.set()
            thread.join()
        self._error = errors[0] if errors else ""

    def after(self, run: Run, step: Step, target: int) -> None:
        """Their prompts are no longer what the previous version computed of them."""
        left = len(self._prompts)
        step.note = f"{left} left" if left else "none could leave: the server answered before"
        if self._error:
            text = f"a request whose client would have left: {self._error}"
            step.findings.append(Finding(fault="lost request", text=text))
        if step.findings:
            return
        for prompt in [*self._prompts[:2], *self._prompts[2:][-2:]]:
            answer = run.server.continued(prompt, NUM_TOKENS)
            step.tokens += len(answer.tokens)
            if not run.is_of(answer, run.oracle.new if target else run.oracle.old):
                text = "a prompt whose client left during the update goes on differently"
                step.findings.append(Finding(fault="stale cache", text=text, prompt=prompt))
                return


def _room(run: Run, prompt: Sequence[int]) -> int:
    longest = run.server.longest()
    return min(run.flight_tokens, longest - len(prompt)) if longest else run.flight_tokens
