"""What a conformance run can find, and how it is counted. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .distance import Tolerance

VLLM = "https://github.com/vllm-project/vllm"
FAULTS = {
    "not delivered": ("The server computes with the previous version.", f"{VLLM}/issues/32718"),
    "partly loaded": (
        "Some tensors are those of the previous version.",
        "https://github.com/verl-project/verl/pull/7987",
    ),
    "wrongly loaded": (
        "Some tensors are neither of the previous version nor of the new one.",
        "https://github.com/NovaSky-AI/SkyRL/issues/1680",
    ),
    "stale derived state": (
        "The tensors arrived; a copy or a buffer made of them is of the previous version.",
        f"{VLLM}/issues/48312",
    ),
    "stale cache": (
        "Prompts known from before are continued from what the previous version computed.",
        f"{VLLM}/issues/9744",
    ),
    "mixed versions": ("One answer has tokens of both versions.", f"{VLLM}/issues/54443"),
    "wrong label": (
        "The version that the server reports is not the one that it computes with.",
        "https://github.com/rllm-org/rllm/pull/622",
    ),
    "wrong adapter": (
        "Requests are computed with an adapter that they do not name, or without the one that they name.",
        f"{VLLM}/pull/48421",
    ),
    "lost request": ("A request in flight got no answer.", "https://github.com/radixark/miles/pull/2589"),
    "hung": ("A call got no answer before the deadline.", "https://github.com/areal-project/AReaL/issues/1160"),
    "refused": ("The server answered an update with an error.", f"{VLLM}/pull/57854"),
    "mixed weights": (
        "After an update that failed, the server serves neither the old version nor the new one.",
        "https://github.com/meta-pytorch/torchforge/issues/251",
    ),
    "paused for ever": (
        "After an update that failed, the server stays paused, and would resume if it were requested.",
        "https://github.com/areal-project/AReaL/issues/1160",
    ),
    "server lost": ("An update that failed ended the server.", f"{VLLM}/pull/57854"),
    "no way on": ("After an update that failed, the next one fails, too.", f"{VLLM}/pull/39212"),
}
"""Class of fault to (its meaning, a public thread about one of its kind)."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault that a step showed."""

    fault: str
    """A key of FAULTS."""
    text: str
    or_else: str | None = None
    """Another class that looks the same from outside."""
    tensors: Sequence[str] = ()
    """Names in transformers' model; `name[3]` is an expert, or another slice."""
    prompt: Sequence[int] = ()
    """Token ids of a prompt that shows it."""

    @property
    def thread(self) -> str:
        return FAULTS[self.fault][1]


@dataclass(kw_only=True)
class Step:
    """One update, or the start, and all that was looked at after it."""

    name: str
    seconds: float = 0.0
    deviation: float = 0.0
    """The distance of the probes' log-probs from the oracle's (`distance.Tolerance`), in nats."""
    tokens: int = 0
    """Log-probs that were compared."""
    in_flight: int = 0
    """Requests that were answered during the update."""
    findings: list[Finding] = field(default_factory=list)
    skipped: str = ""
    """Why it was not tried."""
    note: str = ""
    """What it could not show, or how much of it there was."""


@dataclass(kw_only=True)
class Cell(Step):
    """What became of a server when one fault hit one update. `seconds`: from the fault until the server serves."""

    fault: str
    """A name of `contract.INJECTED`."""
    phase: str
    ended: str = ""
    """How the pusher ended: succeeded, failed, killed, or not at all."""
    error: str = ""
    """What it said."""
    state: str = ""
    """A key of `contract.STATES`; empty if it was not tried."""
    label: str = ""
    """The version that the server then reported."""
    next_update: str = ""
    """Whether the update after it worked: yes, no, or empty if it was not tried."""
    remedy: str = ""
    """What the operator had to do, or has to."""


@dataclass(kw_only=True)
class Report:
    """The result of a run."""

    server: str
    model: str
    route: str
    engine: str
    dtype: str
    oracle: str
    tolerance: Tolerance
    """How far log-probs may be from the oracle's."""
    groups: int = 0
    """Tensors, or slices of stacked tensors, whose single absence was computed."""
    unseen: Sequence[str] = ()
    """Those of them whose absence is hidden by rounding, or changes no probe."""
    weakest: float = 0.0
    """The smallest change, in nats, that the absence of one of the others makes."""
    cache: str = ""
    """Whether prompts hit the prefix cache, so that a stale one would have shown."""
    steps: list[Step] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not any(step.findings for step in self.steps)

    @property
    def cells(self) -> list[Cell]:
        """Of a run with faults: all steps but the look at the start."""
        return [step for step in self.steps if isinstance(step, Cell)]

    @property
    def findings(self) -> list[Finding]:
        return [finding for step in self.steps for finding in step.findings]
