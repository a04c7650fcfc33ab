"""The sequence of a conformance run: cold A, warm B, warm A, warm B again, and what is asked after each update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import CheckpointEngineError, ConfigError, TransportError, TransportTimeout
from .distance import Tolerance
from .oracle import Hypothesis, LogProbs, Oracle, log_probs
from .probes import Answer, Probed
from .routes import Pushed, Route
from .verdicts import Finding, Step

NUM_PROBES = 4
PROBE_TOKENS = 48
NUM_TOKENS = 12
FLIGHT_TOKENS = 160
"""Of each answer in flight: a load that nothing pauses shall end before it does."""
SHORT_TOKENS = 12
"""The most of a prompt in flight, but for one token that is its own."""
IN_FLIGHT = 3
MOST_KNOWN = 0.75
"""Of the tolerance, what a server may be away with weights that it has: other answers are up to a third further."""
CACHED_TOKENS = 160
"""More than a block of vLLM's prefix cache on a CPU, 128."""


@dataclass(frozen=True, kw_only=True)
class Flown:
    """A request that was sent before or during an update."""

    prompt: Sequence[int]
    label: str | None
    """The version that the server reported before it was sent."""
    sent_s: float
    answered_s: float
    answer: Answer | None
    error: str = ""
    is_late: bool = False


class Beside:
    """What an update is tried together with. This one: nothing."""

    in_flight = True
    """Whether requests are in flight during the update."""

    def before(self, run: Run, step: Step) -> None:
        """Called before the update. With findings in `step` there is none."""

    def during(self, run: Run) -> AbstractContextManager[object]:
        """Entered before the update, and left after it."""
        return nullcontext()

    def after(self, run: Run, step: Step, target: int) -> None:
        """Called once the server has been compared with version `target`, 0 or 1, of the model."""


@dataclass
class Run:
    """One server, one route, and two versions of its model."""

    server: Probed
    route: Route
    oracle: Oracle
    """Of A as the old version and B as the new one. Its prompts are the probes."""
    directories: tuple[Path, Path]
    """Of A and B."""
    tolerance: Tolerance
    timeout_s: float
    pause_mode: str = "wait"
    flight_tokens: int = FLIGHT_TOKENS
    version: int = 0
    steps: list[Step] = field(default_factory=list)
    cache: str = ""
    _last: tuple[str, Pushed] | None = None
    """The version that was sent last, and its update."""
    _beside: Answer | None = None
    """To a request that was sent when the last update had been answered, beside older requests."""
    _cold: LogProbs | None = None
    _started: LogProbs | None = None
    """What the server computed before any update, if that is not A."""
    _far_with_b: float | None = None
    """How far it was from B, if that was hardly near enough."""
    _found: dict[int, LogProbs] = field(default_factory=dict)
    """What it computed last with each version."""
    _long: Sequence[int] = ()

    def cold(self) -> Step:
        """Look at the server before any update: does it compute with A?"""
        step = Step(name="cold A")
        found = self.probed()
        step.tokens = len(found)
        step.deviation = self.tolerance.away(found, self.oracle.of_old)
        if step.deviation <= self.tolerance.nats:
            self._cold = found
            self._require_agreement_in_flight(step)
        else:
            self._started = found
        return self._kept(step)

    def _require_agreement_in_flight(self, step: Step) -> None:
        """Answers as long as those in flight, whose versions are told by their log-probs, are near A. Raises
        ConfigError."""
        for prompt in self.oracle.prompts:
            answer = self.server.continued(prompt[:SHORT_TOKENS], self.flight_tokens)
            found = torch.tensor(list(answer.log_probs))
            step.tokens += len(found)
            away = self.tolerance.away(found, _teacher_forced(answer, self.oracle.old))
            step.deviation = max(step.deviation, away)
        if self._is_far(step.deviation):
            raise self._too_far(step.deviation, "before any update")

    def _is_far(self, away: float) -> bool:
        """Too far for a server with the right weights: other answers might be beyond the tolerance."""
        return away > MOST_KNOWN * self.tolerance.nats

    def _too_far(self, away: float, when: str) -> ConfigError:
        return ConfigError(
            f"the server computes otherwise than transformers: {away:.3g} nats away {when}, where {self.tolerance} are "
            "let pass of the many answers that follow. Which version gave a token would not show. Compare the two with "
            "`verl-sync mismatch`"
        )

    def require_agreement(self) -> None:
        """Raises ConfigError for a server that had A from the start, but computes otherwise with it than the oracle:
        A changes nothing, and B does; and for one that has B and is hardly near enough. Called when both have been
        brought."""
        if self._far_with_b is not None:
            raise self._too_far(self._far_with_b, "with the version that it was brought")
        if self._started is None or len(self._found) < 2:
            return
        to_a, to_b = (self.tolerance.away(self._found[target], self._started) for target in (0, 1))
        if to_a <= self.tolerance.nats < to_b:
            away = self.tolerance.away(self._started, self.oracle.of_old)
            raise ConfigError(
                f"the server computes otherwise than transformers: {away:.3g} nats away with the model that it was "
                f"started with, and as far after the same weights came again, where {self.tolerance} are let pass. "
                "What an update leaves out would not show. Compare the two with `verl-sync mismatch`"
            )

    @property
    def is_cold_a(self) -> bool:
        """Whether the server started with A. If not (dummy weights), the first update brings A."""
        return self._cold is not None

    def warm(
        self, to: str, *, in_flight: bool = True, again: bool = False, name: str = "", beside: Beside | None = None
    ) -> Step:
        """Update to version `to`, "A" or "B", and compare."""
        beside = beside or Beside()
        self.version += 1
        target = "AB".index(to)
        step = Step(name=f"{name}, {to}" if name else f"warm {to}" + (" again" if again else ""))
        flown: list[Flown] = []
        self._beside = None
        try:
            self._long = self._fill_cache()
            beside.before(self, step)
            if step.findings:
                return self._kept(step)
            before = self.server.digests()
            began = time.monotonic()
            with self.requests(flown if in_flight else None), beside.during(self):
                push = Pushed(self.route, self.directories[target], self.version)
                self._last = to, push
                label = push.result(self.timeout_s)
                step.seconds = time.monotonic() - began
                if label is not None and in_flight:
                    self._ask_beside(step)
        except ConfigError:  # nothing was sent
            self._last = None
            raise
        except TransportTimeout as exc:
            step.findings.append(Finding(fault="hung", text=str(exc)))
            return self._kept(step)
        except CheckpointEngineError as exc:
            step.findings.append(Finding(fault="refused", text=str(exc)))
            return self._kept(step)
        if label is None:
            step.findings.append(Finding(fault="hung", text=f"the update did not end within {self.timeout_s:g} s"))
            return self._kept(step)
        try:
            self._compare(step, target, label, before, flown)
            beside.after(self, step, target)
        except TransportTimeout as exc:
            step.findings.append(Finding(fault="hung", text=f"after the update: {exc}"))
        except TransportError as exc:
            step.findings.append(Finding(fault="lost request", text=f"after the update: {exc}"))
        return self._kept(step)

    def not_cold_a(self, step: Step) -> str:
        """Why the server does not start with A, of the step of `cold`."""
        return f"the server does not compute with the model yet ({step.deviation:.3g} nats away)"

    def remains(self, model: Path) -> str:
        """What the operator is told if `bring_back` failed. `model`: the directory that the server serves."""
        return f"the server may still have the changed version: bring it {model}"

    def close(self) -> None:
        """Nothing stays."""

    @property
    def may_have_b(self) -> bool:
        """Whether B was sent last."""
        return self._last is not None and self._last[0] == "B"

    def bring_back(self) -> bool:
        """Send A once the last update has ended, for a run that breaks off. Returns whether the server has loaded it;
        errors of the updates are not raised."""
        if self._last is not None:
            with suppress(Exception):
                self._last[1].result(self.timeout_s)
        with suppress(Exception):
            return Pushed(self.route, self.directories[0], self.version + 1).result(self.timeout_s) is not None
        return False

    def not_tried(self, name: str, why: str) -> Step:
        return self._kept(Step(name=name, skipped=why))

    def _kept(self, step: Step) -> Step:
        self.steps.append(step)
        return step

    def probed(self, server: Probed | None = None) -> LogProbs:
        """What the server, or `server`, computes for the probes. Raises what `Probed` does."""
        asked = server or self.server
        return torch.tensor([value for prompt in self.oracle.prompts for value in asked.log_probs(prompt)])

    @property
    def long_prompt(self) -> Sequence[int]:
        """That the prefix cache knew before the last update."""
        return self._long

    def _compare(self, step: Step, target: int, label: str, before: dict[str, str], flown: list[Flown]) -> None:
        expected = self.oracle.of_new if target else self.oracle.of_old
        model = self.oracle.new if target else self.oracle.old
        found = self._found[target] = self.probed()
        reported = self.server.label() if self.route.labels else None
        step.tokens += len(found)
        step.deviation = self.tolerance.away(found, expected)
        is_new = step.deviation <= self.tolerance.nats
        if is_new and target == 1 and self._is_far(step.deviation):
            self._far_with_b = step.deviation
        if not is_new:
            step.findings.append(self._named(found, target, before))
        elif target == 0 and self._cold is not None and (away := self.tolerance.away(found, self._cold)) > 0:
            step.deviation = max(step.deviation, away)
        if reported is not None and reported != label:
            text = f"the server reports {reported!r} after it answered that it serves {label!r}"
            step.findings.append(Finding(fault="wrong label", text=text))
        fresh = [self.server.continued(self._unknown(prompt), NUM_TOKENS) for prompt in self.oracle.prompts[:2]]
        known = [self.server.continued(self._long, NUM_TOKENS)] if self._long else []
        if is_new:
            step.tokens += sum(len(answer.tokens) for answer in (*fresh, *known))
            wrong = [answer for answer in fresh if not self.is_of(answer, model)]
            if wrong:
                text = "prompts are read with the new version, but continued with something else"
                step.findings.append(Finding(fault="stale derived state", text=text, prompt=wrong[0].prompt))
            elif known and not self.is_of(known[0], model):
                text = f"a prompt of {len(self._long)} tokens that was answered before the update goes on differently"
                step.findings.append(Finding(fault="stale cache", text=text, prompt=self._long))
            elif self._beside is not None and not self.is_of(self._beside, model):
                text = "a request sent after the update, while older ones ran, is not answered by the new version"
                step.findings.append(Finding(fault="mixed versions", text=text, prompt=self._beside.prompt))
        old = self.oracle.old if target else self.oracle.new
        self.look_at(step, flown, old, model, label)

    def _ask_beside(self, step: Step) -> None:
        """Ask at once, while requests from before the update may still run."""
        self._beside = self.server.continued(self._unknown(self.oracle.prompts[-1]), NUM_TOKENS)

    def _unknown(self, prompt: Sequence[int]) -> Sequence[int]:
        """The tokens of `prompt` in an order that no earlier update asked for: nothing is in a cache, be a block of it
        one token."""
        at = self.version % len(prompt)
        return [*prompt[at:], *prompt[:at]][::-1]

    def _named(self, found: LogProbs, target: int, before: dict[str, str]) -> Finding:
        """Which fault gives these log-probs."""
        oracle = (
            self.oracle if target else Oracle(self.oracle.new, self.oracle.old, self.oracle.prompts, self.oracle.parts)
        )
        what = oracle.explain(found, self.tolerance)
        at = int((found - oracle.of_new).abs().argmax())
        fault, or_else = what.fault, what.or_else
        if or_else and (shown := self._arrived(what, before)) is not None:
            fault, or_else = ("stale derived state" if shown else "partly loaded"), None
        return Finding(fault=fault, text=what.text, or_else=or_else, tensors=what.parts, prompt=self._prompt_at(at))

    def _arrived(self, what: Hypothesis, before: dict[str, str]) -> bool | None:
        """Whether the tensor's bytes in the server changed, by the server's own digests; None if it does not show."""
        after = self.server.digests()
        own = [name for part in what.parts for name in before if _same(part, name)]
        if not own or any(before[name] == EMPTY for name in own):
            return None
        return any(before[name] != after.get(name) for name in own)

    def _prompt_at(self, place: int) -> Sequence[int]:
        for prompt in self.oracle.prompts:
            if place < len(prompt) - 1:
                return prompt
            place -= len(prompt) - 1
        return ()

    def is_of(self, answer: Answer, model: object) -> bool:
        """Whether an answer has the log-probs that `model` gives its tokens."""
        if not answer.tokens or len(answer.log_probs) != len(answer.tokens):
            return False
        return self.tolerance.allows(torch.tensor(list(answer.log_probs)), _teacher_forced(answer, model))

    def _fill_cache(self) -> Sequence[int]:
        """Have the server answer a long prompt twice, so that its prefix cache knows it."""
        room = self.server.longest() - NUM_TOKENS - 1
        length = min(CACHED_TOKENS, room) if room > 0 else CACHED_TOKENS
        flat = [token for prompt in self.oracle.prompts for token in prompt]
        prompt = (flat * (1 + length // len(flat)))[:length]
        hits = self.server.cache_hits()
        for _ in range(2):
            self.server.continued(prompt, 1)
        later = self.server.cache_hits()
        if hits is None or later is None:
            self.cache = "the server does not count hits of its prefix cache"
        else:
            self.cache = "hit" if later > hits else "not hit: the prompt is shorter than a block, or there is none"
        return prompt

    def requests(self, flown: list[Flown] | None, server: Probed | None = None) -> InFlight:
        """In flight while it is entered, to the server, or to `server`; none if `flown` is None."""
        prompts = [list(prompt)[: SHORT_TOKENS - at] for at, prompt in enumerate(self.oracle.prompts)]
        return InFlight(server or self.server, prompts, self.flight_tokens, flown)

    def look_at(
        self, step: Step, flown: list[Flown], old: object, new: object, label: str | None, whose: str = ""
    ) -> None:
        """What requests in flight show, which `old` or `new` has to answer. `whose`: words for those requests; `label`:
        of `new`, or None if it is not compared."""
        step.in_flight += len(flown)
        for one in flown:
            what = self._shown_by(one, old, new, label, whose)
            if what is not None and (what.fault in ("hung", "lost request", "wrong label") or not step.findings):
                step.findings.append(what)
                return

    def _shown_by(self, one: Flown, old: object, new: object, label: str | None, whose: str) -> Finding | None:
        def finding(fault: str, text: str) -> Finding:
            return Finding(fault=fault, text=text, prompt=one.prompt)

        answer = one.answer
        if answer is None:
            return finding("hung" if one.is_late else "lost request", f"a request in flight{whose}: {one.error}")
        if answer.aborted:
            return None
        if not answer.tokens:
            return finding("lost request", f"an answer{whose} without tokens")
        if self.pause_mode == "keep":
            if _goes_on(answer, old, new, self.tolerance):
                return None
            text = "that was kept during the update goes on from what the previous version computed"
            return finding("stale cache", f"an answer{whose} {text}")
        is_new, is_old = self.is_of(answer, new), self.is_of(answer, old)
        if is_old and not is_new and label is not None and one.label == label and self.version > 1:
            return finding("wrong label", f"the server reported {label!r} before it answered with the previous version")
        if is_new or is_old:
            return None
        place = _switch(answer, old, new, self.tolerance)
        what = "is of no version" if place is None else f"changes its version at token {place}"
        return finding("mixed versions", f"one answer{whose} {what}")


class InFlight:
    """Keeps `IN_FLIGHT` requests running while it is entered; what came of each is in `flown`. The first ones are of
    different lengths, so that not all of them end at once: an update between answers would mix nothing."""

    def __init__(
        self, server: Probed, prompts: Sequence[Sequence[int]], num_tokens: int, flown: list[Flown] | None
    ) -> None:
        self._server, self._prompts, self._num_tokens, self._flown = server, prompts, num_tokens, flown
        self._ends = threading.Event()
        self._begun = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(IN_FLIGHT)
        self._futures: list[Future[None]] = []

    def __enter__(self) -> None:
        if self._flown is None:
            return
        self._futures = [self._pool.submit(self._send, number) for number in range(IN_FLIGHT)]
        for _ in range(IN_FLIGHT):
            self._begun.acquire()
        time.sleep(0.05)  # so that some of them are being answered, not all of them waiting

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for future in self._futures:
            future.result()
        self._pool.shutdown()

    def _send(self, number: int) -> None:
        assert self._flown is not None
        first = True
        while first or not self._ends.is_set():
            prompt = [*self._prompts[number % len(self._prompts)], number + 3]
            label, sent = self._label(), time.monotonic()
            if first:
                self._begun.release()
            num_tokens = max(1, self._num_tokens * (number + 1) // IN_FLIGHT) if first else self._num_tokens
            first = False
            answer, error, late = None, "", False
            try:
                answer = self._server.continued(prompt, num_tokens)
            except CheckpointEngineError as exc:
                error, late = str(exc), isinstance(exc, TransportTimeout)
            self._flown.append(
                Flown(
                    prompt=prompt, label=label, sent_s=sent, answered_s=time.monotonic(), answer=answer, error=error,
                    is_late=late,
                )
            )  # fmt: skip
            if answer is None:
                return

    def _label(self) -> str | None:
        try:
            return self._server.label()
        except CheckpointEngineError:
            return None


EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of nothing: a tensor that the engine keeps in another form."""


def _same(part: str, name: str) -> bool:
    return part.partition("[")[0] == name


def _teacher_forced(answer: Answer, model: object) -> LogProbs:
    whole = [*answer.prompt, *answer.tokens]
    return log_probs(model, [whole])[len(answer.prompt) - 1 :]


def _switch(answer: Answer, old: object, new: object, tolerance: Tolerance) -> int | None:
    """The token from which on an answer is no longer the old version's; None if it never was."""
    said = torch.tensor(list(answer.log_probs))
    away = (_teacher_forced(answer, old) - said).abs()
    of_old = [end for end in range(len(said) + 1) if tolerance.size(away[:end]) <= tolerance.nats]
    return of_old[-1] or None


def _goes_on(answer: Answer, old: object, new: object, tolerance: Tolerance) -> bool:
    """Whether an answer is the old version's up to a token, and from there on the new one's."""
    said = torch.tensor(list(answer.log_probs))
    if len(said) != len(answer.tokens):
        return False
    of_old, of_new = ((_teacher_forced(answer, model) - said).abs() for model in (old, new))
    ends = range(len(said) + 1)
    until_old = min(ends, key=lambda end: float(of_old[:end].sum() + of_new[end:].sum()))
    return tolerance.size(torch.cat([of_old[:until_old], of_new[until_old:]])) <= tolerance.nats


def certify(run: Run, tell: Callable[[str], None]) -> Iterator[Step]:
    """Every step of a run, as it ends. Raises ConfigError if the server cannot be compared with the oracle."""
    step = run.cold()
    yield step
    if not run.is_cold_a:
        tell(f"{run.not_cold_a(step)}: A is brought first")
        yield run.warm("A", in_flight=False)
    yield run.warm("B")
    run.require_agreement()
    yield run.warm("A")
    yield run.warm("B", again=True)
    yield run.warm("A", again=True)
