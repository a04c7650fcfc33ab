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

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.protocol import DataProto
from verl.trainer.ppo.generation import Generation
from verl.trainer.ppo.going_back import StateLost
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, TrainingResult
from verl.trainer.ppo.step import Step
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig


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

    def abandon(self) -> None:
        for generation in (self.generation, self.greedy):
            if generation is not None:
                generation.abandon()


class OneStepOffPolicyTrainer(RayPPOTrainer):
    """A `RayPPOTrainer` that trains while engines generate the next batch. Needs engines on devices of their own."""

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
        return self.result(step)

    def start_next(self, batches: Iterator[tuple[int, DataProto]]) -> Upcoming | None:
        """Have the engines generate the next batch with their present version; None if there is no further batch."""
        state = self.train_dataloader.state_dict()
        for step, prompts in batches:
            generation = self.rollouts.start(prompts)
            greedy = self.rollouts.start(self.sampling.greedily(prompts)) if self.sampling.needs_greedy else None
            return Upcoming(step, prompts, generation, greedy, state)
        return None

    def finish(self, upcoming: Upcoming, now: Step) -> DataProto:
        """Wait for the batch. Raises the errors of its generation.

        Prompts that dynamic sampling draws beyond it are generated now, with the engines' present weights.
        """
        generated = upcoming.generation.result()
        greedy = upcoming.greedy.result() if upcoming.greedy else None
        return self.sampling.chosen(self.sampling.joined(upcoming.prompts, generated, now, greedy), now)

    def state_before(self, upcoming: Upcoming | None) -> dict[str, Any]:
        """The data loader's state before the upcoming batch, which a resumed run generates again."""
        return upcoming.dataloader_state if upcoming else self.train_dataloader.state_dict()
