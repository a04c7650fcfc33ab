"""Training on batch t while the rollout engines generate batch t + 1 with the weights before it.

    engines    gen 1 | gen 2 (version 0) | gen 3 (version 1) | ...
    trainer          | train 1, publish 1 | train 2, publish 2 | ...
                     ^ boundary: version 0 ^ boundary: version 1

At a boundary no request runs, and the engines load the version published and staged meanwhile. So the trainer's batches
are exactly one version old, except for the first one, one generated again after engines died, and prompts that dynamic
sampling draws beyond a batch. A restart of lost trainer ranks does not affect the engines: their batch is kept, unless
the trainer goes back to an older step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from verl.protocol import DataProto
from verl.trainer.kept_samples import Amount, Found, are_same
from verl.trainer.plain_state import from_plain, to_plain
from verl.trainer.ppo.generation import Generation
from verl.trainer.ppo.going_back import StateLost
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, TrainingResult
from verl.trainer.ppo.step import Step
from verl.utils.config import ConfigError
from verl.utils.measured import is_measured
from verl.workers.config import PPOConfig

AHEAD = "generated_ahead"
"""In a checkpoint's state of the data: names of prompts, their responses, and their greedy responses or None."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Upcoming:
    """The batch of a later step while it is generated."""

    step: int
    prompts: DataProto
    generation: Generation
    greedy: Generation | None
    """Generation of greedy responses, after the others, if the estimator needs them."""
    dataloader_state: dict[str, Any]
    """The data loader's state before it drew these prompts."""

    @property
    def end(self) -> Future[DataProto]:
        """Done when the engines have generated all of it."""
        return (self.greedy or self.generation).future

    def to_plain(self) -> Any:
        """What the engines generated, for a checkpoint, without what was measured. Waits for it."""
        uids = self.prompts.non_tensor_batch["uid"].tolist()
        greedy = None if self.greedy is None else _without_measured(self.greedy.result())
        return to_plain((uids, _without_measured(self.generation.result()), greedy))

    def abandon(self) -> None:
        for generation in (self.generation, self.greedy):
            if generation is not None:
                generation.abandon()


@dataclass
class KeptBatch:
    """A batch of an interrupted run."""

    prompts: DataProto
    generated: DataProto | None = None
    greedy: DataProto | None = None
    amount: Amount = Amount()


class OneStepOffPolicyTrainer(RayPPOTrainer):
    """A `RayPPOTrainer` that trains while engines generate the next batch. Needs engines on devices of their own."""

    GENERATES_AHEAD = True

    _ahead: tuple[list[str], DataProto, DataProto | None] | None = None
    """What came with a checkpoint under AHEAD, until the first batch."""
    _keeping_thread: ThreadPoolExecutor | None = None
    _kept_batches: Mapping[int, KeptBatch] = MappingProxyType({})
    """By step, of those that an interrupted run had generated."""

    @classmethod
    def adapted(cls, config: PPOConfig) -> PPOConfig:
        if config.trainer.placement != "separate":
            raise ConfigError(
                f"trainer.placement={config.trainer.placement}: engines that generate while the trainer trains need "
                "trainer.placement=separate; for engines that share the trainer's devices use verl.trainer.main_ppo"
            )
        return super().adapted(config)

    def train_after(self, start: int) -> TrainingResult:
        self.begin_training(start)
        self._take_kept(start)
        batches = self.batches(start)
        step, upcoming = start, self.start_next(batches)
        try:
            while upcoming is not None:
                step = upcoming.step
                now = self.at(step)
                with now.timed("step"):
                    with now.timed("gen"):
                        batch = self.finish(upcoming, now)
                    upcoming = self.start_next(batches)
                    generating = upcoming.end if upcoming else None
                    batch = self.train(batch, now, generating, partial(self.state_before, upcoming))
                    # What was left of the generation when its successor's weights were ready is no part of the sync.
                    waited_s = now.metrics["checkpoint_engine/wait_s"]
                    now.seconds["gen"] += waited_s
                    now.seconds["update_weights"] -= waited_s
                self.report(now, batch)
        except StateLost:
            if upcoming is not None:  # its policy is of a step that is undone
                upcoming.abandon()
            raise
        self._wait_until_kept()
        return self.result(step)

    def start_next(self, batches: Iterator[tuple[int, DataProto]]) -> Upcoming | None:
        """Have the engines generate the next batch with their present version; None if there is no further batch.

        A batch that came with a checkpoint, or was kept since, is used as it is: no engine has the version that
        generated it.
        """
        state = self.train_dataloader.state_dict()
        for step, prompts in batches:
            if (ahead := self._generated_ahead(prompts)) is not None:
                generation, greedy = ahead
                self._kept_batch(step, prompts)  # the same one
                return Upcoming(step, prompts, generation, greedy, state)
            if (kept := self._kept_batch(step, prompts)) is not None:
                assert kept.generated is not None  # it is whole
                greedy = None if kept.greedy is None else Generation.of(kept.greedy)
                return Upcoming(step, kept.prompts, Generation.of(kept.generated), greedy, state)
            generation = self.rollouts.start(prompts, self._keep(step, prompts))
            greedy = None
            if self.sampling.needs_greedy:
                asked = self.sampling.greedily(prompts)
                greedy = self.rollouts.start(asked, self._keep(step, prompts, greedily=True))
            return Upcoming(step, prompts, generation, greedy, state)
        return None

    def _keep(self, step: int, prompts: DataProto, *, greedily: bool = False) -> Callable[[DataProto], None] | None:
        """What writes a batch of responses to the file of the step before `step`, in the background."""
        kept = self.kept
        if kept is None:
            return None
        if self._keeping_thread is None:
            self._keeping_thread = ThreadPoolExecutor(1, thread_name_prefix="keep-tokens")
        submit = self._keeping_thread.submit

        def keep(generated: DataProto) -> None:
            own = _without_measured(generated)  # the trainer takes the times out of the other one
            submit(kept.append, step - 1, (prompts, own, greedily), own)

        return keep

    def _take_kept(self, start: int) -> None:
        """Take what an interrupted run generated for the steps after `start`."""
        self._kept_batches = {}
        if self.kept is None:
            return
        self._wait_until_kept()
        found, batches = self.kept.read(start), dict[int, KeptBatch]()
        for record in found.records:
            prompts, generated, is_greedy = record.content
            batch = batches.setdefault(record.number + 1, KeptBatch(prompts))
            batch.amount += record.amount
            if is_greedy:
                batch.greedy = generated
            else:
                batch.generated = generated
        following = start
        for step, batch in sorted(batches.items()):
            is_whole = batch.generated is not None and (batch.greedy is not None or not self.sampling.needs_greedy)
            if is_whole and step == following + 1:
                following = step
            else:
                found.drop("after a batch that is not whole", batches.pop(step).amount)
        self.kept.forget_from(following)
        self._kept_batches = batches
        found.tell(sum((batch.amount for batch in batches.values()), Amount()))
        self.count_kept(found.lost, "kept_dropped")

    def _kept_batch(self, step: int, prompts: DataProto) -> KeptBatch | None:
        """The batch of an interrupted run for `step`, if it is of these prompts."""
        kept = self._kept_batches.get(step)
        if kept is None:
            return None
        if are_same(_asked(kept.prompts), _asked(prompts)):
            self.count_kept(kept.amount)
            return kept
        lost = Found([], step)
        for other, batch in self._kept_batches.items():
            if other >= step:
                lost.drop("of other prompts than the ones that follow now", batch.amount)
        self._kept_batches = {}
        if self.kept is not None:
            self._wait_until_kept()
            self.kept.forget_from(step - 1)
        lost.tell(Amount())
        self.count_kept(lost.lost, "kept_dropped")
        return None

    def _wait_until_kept(self) -> None:
        thread, self._keeping_thread = self._keeping_thread, None
        if thread is not None:
            thread.shutdown()

    def _generated_ahead(self, prompts: DataProto) -> tuple[Generation, Generation | None] | None:
        """The responses to `prompts` that came with the checkpoint, if that has any."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        uids, generated, greedy = ahead
        if uids != prompts.non_tensor_batch["uid"].tolist():
            logger.warning("the checkpoint's batch that was generated ahead is of other prompts, and is not used")
            return None
        return Generation.of(generated), None if greedy is None else Generation.of(greedy)

    def finish(self, upcoming: Upcoming, now: Step) -> DataProto:
        """Wait for the batch. Raises the errors of its generation.

        Prompts that dynamic sampling draws beyond it are generated now, with the engines' present weights.
        """
        generated = upcoming.generation.result()
        greedy = upcoming.greedy.result() if upcoming.greedy else None
        return self.sampling.chosen(self.sampling.joined(upcoming.prompts, generated, now, greedy), now)

    def state_before(self, upcoming: Upcoming | None) -> dict[str, Any]:
        """The data loader's state before the upcoming batch, which a resumed run generates again.

        With `full_determinism` the batch itself is in it, too: a resumed run has other weights than those that
        generated it.
        """
        if upcoming is None:
            return self.train_dataloader.state_dict()
        if not self.config.trainer.full_determinism:
            return upcoming.dataloader_state
        return upcoming.dataloader_state | {AHEAD: upcoming.to_plain()}

    def restore_prompts(self, state: Mapping[str, Any]) -> None:
        super().restore_prompts(state)
        self._ahead = from_plain(state[AHEAD]) if AHEAD in state else None


def _asked(prompts: DataProto) -> Any:
    """All of the prompts but the names that this run gave them."""
    columns = {name: column for name, column in prompts.non_tensor_batch.items() if name != "uid"}
    return to_plain(DataProto(prompts.batch, columns, {}))


def _without_measured(generated: DataProto) -> DataProto:
    timing = generated.meta_info.get("timing", {})
    computed = {name: value for name, value in timing.items() if not is_measured(name)}
    return DataProto(generated.batch, generated.non_tensor_batch, generated.meta_info | {"timing": computed})
