"""How a run continues after its trainer ranks were lost and started again.

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
    """Restarted trainer ranks lack the state of the current step. The cause is the error that ended them."""


@dataclass(frozen=True)
class Beginning:
    """The state with which a run began."""

    checkpoint: Path | None
    """The checkpoint that the run was resumed from, if any."""
    prompts: dict[str, Any]
    """State of the data loader."""
    kl_coef: float


@dataclass(frozen=True)
class Learned:
    """A step with its batch and KL coefficient as they were before the update."""

    now: Step
    batch: DataProto
    kl_coef: float


class GoingBack:
    """Retries steps after the loss of trainer ranks. One per run, used on the driver's main thread."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        kept: str,
        learn: Callable[[Learned], DataProto],
        restore: Callable[[], tuple[int, Path | None]],
    ) -> None:
        """`kept` names, for the log, what survives the loss of trainer ranks. `learn` updates, and returns the batch.

        `restore` loads the last checkpoint, or the beginning's state: returns the step, and the checkpoint or None.
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
        """The result of `train_after(step)`. When that raises StateLost, it is called again with an earlier step."""
        while True:
            try:
                return train_after(step)
            except StateLost:
                step = self.attempt(self._go_back, again=self._go_back)

    def begin(self, work: Callable[[], None]) -> None:
        """Call `work` before the first step. Raises StateLost if trainer ranks are lost during it."""

        def lose(failure: Exception) -> None:
            raise StateLost from failure

        self.attempt(work, again=lose)

    def train(self, step: Learned, then: Callable[[], None]) -> DataProto:
        """Learn from the step, then call `then`. Repeats what lost ranks do not remember. Returns the batch.

        Raises StateLost if the ranks have no state of this step or the one before in memory.
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
        """The result of `work`, or of `again` if trainer ranks were lost during `work`."""
        return self._recovery.attempt(STEP, work, failures=(Exception,), again=again)

    def catch_up(self, step: int, failure: Exception) -> int:
        """Bring restarted trainer ranks to the state after `step`, or a later one, and return that step.

        If they died before the state of `step` was in memory, they learn it once more from its batch. Raises StateLost
        if they cannot. Raises `failure` if no ranks were lost since the last call: it has another reason.
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
