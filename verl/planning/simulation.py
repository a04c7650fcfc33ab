"""A discrete simulation of training steps in the three modes: work, waits, and age of samples.

The engines have slots, each of which decodes one response; the trainer takes the prompts of a step when all their
responses are finished. Time goes from event to event; between two events trainer and engines work at constant rates,
slower ones while both work, if they share processors.

    hybrid          generate, train, sync, one after the other
    one_step_off    the next batch is generated while this one is trained; a sync in between
    fully_async     generation goes on, as far ahead as a run's `StalenessBudget` allows; a sync every few steps
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import asdict, dataclass
from math import log, sqrt
from typing import Any

from verl.experimental.fully_async_policy.budget import StalenessBudget
from verl.utils.config import option
from verl.workers.config.async_training import AsyncTrainingConfig

MODES = ("hybrid", "one_step_off", "fully_async")
ENDLESS = float("inf")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The simulated workload: words after --simulate, like prompts=64 update_s=20."""

    prompts: int = option(64, "of a step", least=1)
    responses: int = option(8, "of a prompt", least=1)
    replicas: int = option(0, "engines; 0: those of the plan", least=0)
    slots: int = option(256, "responses that a replica decodes at once", least=1)
    tokens: float = option(2000.0, "of a response, on the mean", above=0)
    spread: float = option(0.8, "standard deviation of tokens, over their mean (lognormal)", least=0)
    most_tokens: int = option(1_000_000, "of a response", least=1)
    token_s: float = option(0.03, "seconds of a token of one response", above=0)
    update_s: float = option(30.0, "seconds of a training step", above=0)
    trainer_slowed: float = option(1.0, "how many times slower it is while engines work on the same cores", least=1)
    engine_slowed: float = option(1.0, "the same of engines while the trainer works", least=1)
    staleness: float = option(0.5, "fully_async: prompts ahead of the next sync, as a share of those trained", least=0)
    sync_every: int = option(4, "fully_async: steps from sync to sync", least=1)
    failure_s: float = option(0.0, "mean seconds between failures of a replica; 0: none", least=0)
    restart_s: float = option(120.0, "seconds until a replica that failed is back", least=0)
    steps: int = option(50, "of which the first five do not count", least=6)
    seed: int = option(0, "of lengths and failures", least=0)


@dataclass(frozen=True, kw_only=True)
class SyncSeconds:
    """The costs of a sync."""

    total_s: float
    blocked_s: float
    """The trainer's wait, if it goes on as soon as its weights are copied."""
    pause_s: float
    """The pause of generation, if it goes on while a version is staged."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    mode: str
    step_s: float
    tokens_per_s: float
    waits_for_samples: float
    """The share of time that the trainer waits for samples."""
    waits_for_sync: float
    engines_idle: float
    """The share of time that engines are idle or paused."""
    slots_used: float
    """The mean share of slots in use."""
    staleness: float
    most_staleness: int
    failures: int

    @property
    def waiting_side(self) -> str:
        return "trainer" if self.waits_for_samples > self.engines_idle else "engines"


WARM_UP = 5


class Simulation:
    """One run in one mode. Used once."""

    def __init__(self, mode: str, work: Workload, sync: SyncSeconds) -> None:
        self._mode, self._work, self._sync = mode, work, sync
        self._random = random.Random(work.seed)
        self._capacity = work.slots * work.replicas
        self.now = 0.0
        self._decoded = 0.0
        """Seconds of decoding that every slot has had which was never empty: ends of responses are told by it."""
        self._running: list[tuple[float, int]] = []
        """(when it ends, in those seconds; prompt)"""
        self._waiting: deque[int] = deque()
        """A prompt for each response that has no slot yet."""
        self._left: dict[int, int] = {}
        """Responses of each prompt that are not done."""
        self._begun: dict[int, list[int]] = {}
        """Versions with which the responses of each prompt began."""
        self._done: deque[int] = deque()
        self._next_prompt = self._version = self._trained = 0
        """`_version`: training steps behind the weights that engines have."""
        self._tokens = self._samples_s = self._sync_s = self._idle_s = self._slot_s = 0.0
        self._ages: list[int] = []
        self._failures = 0
        self._next_failure_s = self._draw_failure()

    def run(self) -> Outcome:
        began_s = 0.0
        for step in range(self._work.steps):
            if step == WARM_UP:
                began_s = self.now
                self._tokens = self._samples_s = self._sync_s = self._idle_s = self._slot_s = 0.0
                self._ages.clear()
                self._failures = 0
            getattr(self, f"_{self._mode}")(step)
        elapsed_s, counted = self.now - began_s, self._work.steps - WARM_UP
        return Outcome(
            mode=self._mode,
            step_s=elapsed_s / counted,
            tokens_per_s=self._tokens / elapsed_s,
            waits_for_samples=self._samples_s / elapsed_s,
            waits_for_sync=self._sync_s / elapsed_s,
            engines_idle=self._idle_s / elapsed_s,
            slots_used=self._slot_s / (elapsed_s * self._capacity),
            staleness=sum(self._ages) / len(self._ages),
            most_staleness=max(self._ages),
            failures=self._failures,
        )

    # ---- modes

    def _hybrid(self, _step: int) -> None:
        for _ in range(self._work.prompts):
            self._start_prompt()
        self._take()
        self._train()
        self._synchronise(self._sync.total_s, paused=True)

    def _one_step_off(self, step: int) -> None:
        if not step:
            for _ in range(self._work.prompts):
                self._start_prompt()
        self._take()
        self._synchronise(self._sync.blocked_s, paused=False)
        self._synchronise(self._sync.total_s - self._sync.blocked_s, paused=True)
        for _ in range(self._work.prompts):
            self._start_prompt()
        self._train()

    def _fully_async(self, step: int) -> None:
        if not step:
            limit = AsyncTrainingConfig(
                staleness_threshold=self._work.staleness, trigger_parameter_sync_step=self._work.sync_every
            ).max_outstanding(self._work.prompts)
            self._budget = StalenessBudget(limit)
        self._fill()
        self._take()
        self._train()
        if (step + 1) % self._work.sync_every == 0:
            self._synchronise(self._sync.blocked_s, paused=False)
            self._pause(self._sync.pause_s)
            self._budget.synced([*self._left, *self._done])
            self._fill()

    def _fill(self) -> None:
        """Prompts are drawn when there are slots, as far as the budget goes."""
        while not self._budget.is_spent and not self._waiting:
            self._budget.start(self._start_prompt())

    # ---- what happens

    def _start_prompt(self) -> int:
        prompt, self._next_prompt = self._next_prompt, self._next_prompt + 1
        self._left[prompt] = self._work.responses
        self._begun[prompt] = []
        self._waiting.extend([prompt] * self._work.responses)
        self._take_slots()
        return prompt

    def _take_slots(self) -> None:
        while self._waiting and len(self._running) < self._capacity:
            tokens, prompt = self._draw_tokens(), self._waiting.popleft()
            heapq.heappush(self._running, (self._decoded + tokens * self._work.token_s, prompt))
            self._begun[prompt].append(self._version)
            self._tokens += tokens

    def _take(self) -> None:
        """The trainer waits for the prompts of a step."""
        began_s = self.now
        while len(self._done) < self._work.prompts:
            self._advance(ENDLESS, trains=False)
        self._samples_s += self.now - began_s
        for _ in range(self._work.prompts):
            self._ages += [self._trained - version for version in self._begun.pop(self._done.popleft())]

    def _train(self) -> None:
        left_s = self._work.update_s
        while left_s > 0:
            left_s -= self._advance(left_s, trains=True)
        self._trained += 1

    def _synchronise(self, seconds: float, *, paused: bool) -> None:
        """The trainer waits; `paused`: engines do, too, and compute with a new version then."""
        self._sync_s += seconds
        if paused:
            self._pause(seconds)
            return
        left_s = seconds
        while left_s > 0:
            left_s -= self._advance(left_s, trains=False)

    def _pause(self, seconds: float) -> None:
        """Responses go on with the new weights."""
        self.now += seconds
        self._idle_s += seconds
        self._version = self._trained

    def _advance(self, most_s: float, *, trains: bool) -> float:
        """To the next event, or by `most_s` of the trainer's work; how much of it was done."""
        generates, work = bool(self._running), self._work
        both = trains and generates
        decoding, training = (1 / work.engine_slowed, 1 / work.trainer_slowed) if both else (1.0, 1.0)
        passed_s = min(most_s / training, max(self._next_failure_s - self.now, 0.0))
        if generates:
            passed_s = min(passed_s, (self._running[0][0] - self._decoded) / decoding)
            self._slot_s += len(self._running) * passed_s
        else:
            self._idle_s += passed_s
        assert passed_s < ENDLESS  # the trainer waits for responses, so some are being made
        is_end = generates and passed_s >= (self._running[0][0] - self._decoded) / decoding
        self.now += passed_s
        self._decoded = self._running[0][0] if is_end else self._decoded + passed_s * decoding
        while self._running and self._running[0][0] <= self._decoded:
            self._end(heapq.heappop(self._running)[1])
        if self.now >= self._next_failure_s:
            self._fail()
        self._take_slots()
        if self._mode == "fully_async":
            self._fill()
        return passed_s * training

    def _end(self, prompt: int) -> None:
        self._left[prompt] -= 1
        if not self._left[prompt]:
            del self._left[prompt]
            self._done.append(prompt)

    def _fail(self) -> None:
        """One replica's responses begin again when it is back."""
        self._failures += 1
        self._next_failure_s = self.now + self._draw_failure()
        hit = set(self._random.sample(range(len(self._running)), len(self._running) // self._work.replicas))
        lost_s = self._work.restart_s
        self._running = [
            (self._decoded + lost_s + self._draw_tokens() * self._work.token_s, prompt)
            if place in hit
            else (end, prompt)
            for place, (end, prompt) in enumerate(self._running)
        ]
        heapq.heapify(self._running)

    def _draw_failure(self) -> float:
        mean_s = self._work.failure_s
        return self._random.expovariate(self._work.replicas / mean_s) if mean_s else ENDLESS

    def _draw_tokens(self) -> float:
        variance = log(1 + self._work.spread**2)
        drawn = self._random.lognormvariate(log(self._work.tokens) - variance / 2, sqrt(variance))
        return min(max(drawn, 1.0), float(self._work.most_tokens))


def simulate(work: Workload, sync: SyncSeconds) -> list[Outcome]:
    """Simulate each mode. `work.replicas` must be above 0."""
    return [Simulation(mode, work, sync).run() for mode in MODES]


def described(outcome: Outcome) -> dict[str, Any]:
    """The outcomes for JSON."""
    return {**asdict(outcome), "waiting_side": outcome.waiting_side}
