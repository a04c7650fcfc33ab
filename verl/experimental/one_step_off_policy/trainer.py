"""Training on batch t while the rollout engines generate batch t + 1 with the weights before it.

    engines    gen 1 | gen 2 (version 0) | gen 3 (version 1) | ...
    trainer          | train 1, publish 1 | train 2, publish 2 | ...
                     ^ boundary: version 0 ^ boundary: version 1

At a boundary nothing generates, and the engines load the version that was published and staged meanwhile. What the
trainer learns from is therefore exactly one version old; only the first batch, and one that had to be generated again
because its engines died, are not. Trainer ranks that are started again after they were lost take nothing from the
engines: what these generate meanwhile stays what it is, unless the trainer goes back to an older step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.protocol import DataProto
from verl.trainer.ppo.generation import Generation
from verl.trainer.ppo.going_back import StateLost
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Step, TrainingResult
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig


@dataclass(frozen=True)
class Upcoming:
    """The batch of a later step, which is being generated."""

    step: int
    prompts: DataProto
    generation: Generation
    dataloader_state: dict[str, Any]
    """With which these prompts would be drawn again."""


class OneStepOffPolicyTrainer(RayPPOTrainer):
    """`RayPPOTrainer` with another order of things. Engines must not have to make room for the trainer."""

    samples_dynamically = False

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
                    generating = upcoming.generation.future if upcoming else None
                    batch = self.train(batch, now, generating, partial(self.state_before, upcoming))
                    # What was left of the generation when its successor's weights were ready is no part of the sync.
                    waited_s = now.metrics["checkpoint_engine/wait_s"]
                    now.seconds["gen"] += waited_s
                    now.seconds["update_weights"] -= waited_s
                self.report(now, batch)
        except StateLost:
            if upcoming is not None:  # its policy is of a step that is undone
                upcoming.generation.abandon()
            raise
        return self.result(step)

    def start_next(self, batches: Iterator[tuple[int, DataProto]]) -> Upcoming | None:
        """Have the engines generate the next batch, with the version that they have; None when there is none."""
        state = self.train_dataloader.state_dict()
        for step, prompts in batches:
            return Upcoming(step, prompts, self.rollouts.start(prompts), state)
        return None

    def finish(self, upcoming: Upcoming, now: Step) -> DataProto:
        """Wait for the batch; raises what went wrong with it."""
        return self.joined(upcoming.prompts, upcoming.generation.result(), now)

    def state_before(self, upcoming: Upcoming | None) -> dict[str, Any]:
        """Of the data loader: a resumed run generates the upcoming batch again."""
        return upcoming.dataloader_state if upcoming else self.train_dataloader.state_dict()
