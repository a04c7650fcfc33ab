"""How a run whose trainer ranks were lost, and started again, gets back to where it was.

ranks that remember their last step    go on with it: with its sync and checkpoint, if those are not made
ranks that remember the step before    learn the last one once more, from its samples
others                                 have the state of a checkpoint, or of the beginning; the loop starts anew there
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verl.protocol import DataProto
from verl.trainer.fleet.cluster import Cluster
from verl.trainer.fleet.recovery import STEP
from verl.trainer.fleet.trainer_ranks import STATE, Loss
from verl.trainer.ppo.step import Step
from verl.utils.timing import marked_timer

T = TypeVar("T")
logger = logging.getLogger(__name__)


class StateLost(Exception):
    """Trainer ranks were started again, without the state of the step under way. Its cause is why they were."""


@dataclass(frozen=True)
class Beginning:
    """Where a run began."""

    checkpoint: Path | None
    """That it was resumed from."""
    prompts: dict[str, Any]
    """State of the data loader."""
    kl_coef: float


@dataclass(frozen=True)
class Learned:
    """A step, as it was before it was learned."""

    now: Step
    batch: DataProto
    kl_coef: float


class GoingBack:
    """For one run, on its driver's main thread."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        kept: str,
        learn: Callable[[Learned], DataProto],
        restore: Callable[[], tuple[int, Path | None]],
    ) -> None:
        """`kept`: what goes on when trainer ranks are lost. `learn` returns the batch with all that it took.

        `restore` gives ranks the last state on disk, or that of the beginning: the step, and the checkpoint if any.
        """
        self._recovery, self._ranks = cluster.recovery, cluster.trainer_ranks
        self._kept, self._learn, self._restore = kept, learn, restore
        self._learned: Learned | None = None
        """The last step: trainer ranks that are lost before they have left its state in memory learn it again."""
        self._caught_up = 0
        """The restart of trainer ranks that was made good last."""
        self.weights_of = 0
        """The step whose weights the trainer ranks have."""

    def until_done(self, train_after: Callable[[int], T], step: int) -> T:
        """What `train_after` returns, which starts from `step`, and from an earlier one when it raises StateLost."""
        while True:
            try:
                return train_after(step)
            except StateLost:
                step = self.attempt(self._go_back, again=self._go_back)

    def begin(self, work: Callable[[], None]) -> None:
        """`work` before the first step. Raises StateLost if ranks are lost in it."""

        def lose(failure: Exception) -> None:
            raise StateLost from failure

        self.attempt(work, again=lose)

    def train(self, step: Learned, then: Callable[[], None]) -> DataProto:
        """Learn it, and do what comes `then`. If ranks are lost in it, from where they remember. Returns the batch.

        Raises StateLost if they do not remember.
        """
        batch: DataProto | None = None

        def work() -> DataProto:
            nonlocal batch
            if batch is None:
                batch = self._learn_and_keep(step)
            then()
            return batch

        def again(failure: Exception) -> DataProto:
            nonlocal batch
            if self.catch_up(step.now.number - 1, failure) < step.now.number:
                batch, step.now.is_synced = None, False
            return work()

        return self.attempt(work, again=again)

    def attempt(self, work: Callable[[], T], again: Callable[[Exception], T]) -> T:
        """What `work` returns, or `again` if ranks were lost in it."""
        return self._recovery.attempt(STEP, work, failures=(Exception,), again=again)

    def catch_up(self, step: int, failure: Exception) -> int:
        """Have trainer ranks that were started again the state after `step` or a later one: which.

        If they died before that of `step` was in memory, they learn it once more from its batch. Raises StateLost if
        they cannot, and `failure` if they have not been lost anew: then it is not for that reason.
        """
        restarts, last = self._ranks.restarts, self._learned
        if restarts == self._caught_up:
            raise failure
        remembered = self._loss.remembered
        learns_again = last is not None and last.now.number == step and remembered == step - 1
        if remembered is None or (remembered < step and not learns_again):
            raise StateLost from failure
        self._tell(remembered, "from memory")
        if last is not None and learns_again:
            self._learn_and_keep(last)
        self._caught_up, self.weights_of = restarts, max(remembered, step)
        return self.weights_of

    def _learn_and_keep(self, step: Learned) -> DataProto:
        batch = self._learn(step)
        self.weights_of = step.now.number
        self._ranks.memory.keep(step.now.number)
        self._learned = step
        return batch

    def _go_back(self, _: Exception | None = None) -> int:
        """The step to continue after, whose state the ranks have then."""
        self._ranks.memory.forget()
        with marked_timer(STATE, self._loss.seconds):
            step, checkpoint = self._restore()
        self._tell(step, f"from {checkpoint or 'the beginning'}")
        self._learned, self._caught_up = None, self._ranks.restarts
        return step

    @property
    def _loss(self) -> Loss:
        """The last one of trainer ranks."""
        loss = self._ranks.loss
        assert loss is not None  # who asks knows of one
        return loss

    def _tell(self, step: int, source: str) -> None:
        """Say what was lost, and where the run goes on."""
        logger.warning(
            "%s; %s are kept; the trainer goes on after step %d, %s, after %s",
            self._loss.what,
            self._kept,
            step,
            source,
            self._loss,
        )
