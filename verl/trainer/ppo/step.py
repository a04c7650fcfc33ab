"""Measurements of one training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from verl.checkpoint_engine.plan.delta_choice import CHANGE_LIMITS
from verl.checkpoint_engine.plan.types import SyncReport
from verl.protocol import DataProto
from verl.utils.timing import Patience, SpanLog, marked_timer
from verl.utils.tracking_services import Histogram
from verl.workers.reward_manager import Failures, RewardManager, RewardOutput

Metrics = dict[str, float]


@dataclass
class Step:
    """The metrics, timings and reward of one training step."""

    number: int
    patience: Patience
    metrics: Metrics = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    seconds: Metrics = field(default_factory=dict)
    spans: SpanLog = field(default_factory=lambda: SpanLog("trainer"))
    syncs: SpanLog = field(default_factory=lambda: SpanLog("sync"))
    reward: RewardOutput | None = None
    """The batch's reward, once computed. Dynamic sampling computes it first; it is not computed twice."""
    failures: Failures | None = None
    """Failures of the reward function on all samples scored in the step, including those not trained on."""
    is_synced: bool = False
    """True once the rollout engines have the weights of this step."""

    def scored(self, manager: RewardManager, batch: DataProto, max_failed: float) -> RewardOutput:
        """Score. Raises RewardError once the reward function fails on more than this share of the step's samples."""
        self.failures = self.failures or Failures(max_failed)
        return self.failures.score(manager, batch)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block as phase `name` of the step; "step" is the whole."""
        with ExitStack() as stack:
            if name != "step":
                stack.enter_context(self.patience.during(name, f"step {self.number}: {name}"))
            stack.enter_context(marked_timer(name, self.seconds, self.spans, self.number))
            yield

    def synced(self, report: SyncReport) -> None:
        """Record the report of a finished sync."""
        self.metrics |= report.metrics()
        if report.delta is not None and report.delta.tensors_by_change:
            counts = report.delta.tensors_by_change
            self.histograms["checkpoint_engine/delta/changed_fraction_of_tensors"] = Histogram(CHANGE_LIMITS, counts)
        for phase, start_s, stop_s in report.timed_laps():
            self.syncs.add(phase, start_s, stop_s, report.version)
