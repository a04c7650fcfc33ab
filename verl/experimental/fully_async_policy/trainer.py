"""The trainer takes samples from a queue that a rollouter fills; every few steps the engines get its weights.

    dataset -> Rollouter -> agent loops, rollout engines -> MessageQueue -> trainer
                  ^                     ^                                      |
                  |   budget            |   weights, every k steps             |
                  +---------------------+--------------------------------------+

Versions are trainer steps: a sync after step s makes version s, and the trainer goes on when its weights are copied.
With `staleness_threshold=0` and `trigger_parameter_sync_step=1` the rollouter starts exactly what the next step takes,
and waits for the sync: the same samples, versions and updates as in hybrid mode.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from fractions import Fraction
from statistics import fmean
from typing import Any

import numpy as np
import ray
import torch

from verl.checkpoint_engine.plan.types import SyncReport
from verl.experimental.agent_loop.server_manager import COUNTS
from verl.experimental.fully_async_policy.message_queue import Sample
from verl.experimental.fully_async_policy.state import RollouterState, uid_of
from verl.experimental.fully_async_policy.supply import Supply, Terms
from verl.protocol import DataProto, tensors_of
from verl.trainer.fleet.recovery import SYNC
from verl.trainer.fleet.syncs import FAILED_SYNCS
from verl.trainer.kept_samples import Amount
from verl.trainer.ppo.core_algos import BASELINES
from verl.trainer.ppo.dynamic_sampling import filling
from verl.trainer.ppo.going_back import StateLost
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, TrainingResult
from verl.trainer.ppo.step import Metrics, Step
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig
from verl.workers.rollout.records import NO_VERSION

logger = logging.getLogger(__name__)


class FullyAsyncTrainer(RayPPOTrainer):
    """A `RayPPOTrainer` that learns from samples of a queue."""

    KEPT = "engines, agent loops, reward workers, rollouter and queue"
    GENERATES_AHEAD = True

    _supply: Supply | None = None
    _furthest: int = 0
    """The place of the last prompt that was taken."""
    _syncing: Future[tuple[SyncReport, Metrics | None]] | None = None
    _resumed: RollouterState | None = None
    _uids_are_old: bool = False
    _waiting: int = 0
    """The number of samples that waited for the trainer when it began, and that it has not taken yet."""

    @classmethod
    def adapted(cls, config: PPOConfig) -> PPOConfig:
        if config.trainer.placement != "separate":
            raise ConfigError(
                f"trainer.placement={config.trainer.placement}: engines that generate while the trainer trains need "
                "trainer.placement=separate; for engines that share the trainer's devices use verl.trainer.main_ppo"
            )
        if config.data.gen_batch_size not in (None, 1):
            raise ConfigError(
                f"data.gen_batch_size={config.data.gen_batch_size}, but prompts are generated one by one: 1"
            )
        if config.trainer.full_determinism:
            raise ConfigError(
                "trainer.full_determinism=true: in a fully asynchronous run the arrival of samples decides what a step "
                "learns from, and with which weights they are generated. Use main_ppo or one_step_off_policy"
            )
        rollout = config.actor_rollout_ref.rollout
        agent = replace(rollout.agent, partial_rollout=config.async_training.partial_rollout)
        policy = replace(config.actor_rollout_ref, rollout=replace(rollout, agent=agent))
        required, trainer = _required(config), config.trainer
        if (total := config.async_training.total_rollout_steps) is not None:
            if total < required:
                raise ConfigError(f"async_training.total_rollout_steps={total}, but a step takes {required} prompts")
            trainer = replace(trainer, total_training_steps=total // required)
        data = replace(config.data, train_batch_size=required, gen_batch_size=None)
        return replace(config, data=data, actor_rollout_ref=policy, trainer=trainer)

    def train_after(self, start: int) -> TrainingResult:
        self.begin_training(start)
        step = start
        try:
            with self.generating(start):
                while step < self.total_steps and not self.config.trainer.val_only:
                    step += 1
                    now = self.at(step)
                    with now.timed("step"):
                        with now.timed("gen"):
                            batch = self.take(now)
                        batch = self.train(batch, now, prompts_state=self.rollouter_state)
                    now.metrics["fully_async/total_wait_time"] = now.seconds["gen"]
                    now.metrics["fully_async/trainer/idle_ratio"] = now.seconds["gen"] / now.seconds["step"]
                    now.metrics["fully_async/rollouter/restarts"] = self.supply.restarts
                    self.report(now, batch)
                last = self.at(step)
                self.end_sync(last, version=step)
                self.reports.write_timeline(last)
        except StateLost:
            self.abandon_sync()
            raise
        return self.result(step)

    def who_knows_progress(self) -> dict[str, Callable[[], Sequence[Any]]]:
        return {**super().who_knows_progress(), "gen": lambda: self.supply.ask_progress()}

    @property
    def supply(self) -> Supply:
        """The supply of samples; only during training."""
        assert self._supply is not None  # there is one while it trains
        return self._supply

    def follow_replicas(self) -> None:
        super().follow_replicas()
        if self._supply is not None:
            self._supply.set_max_in_flight()

    @property
    def max_in_flight(self) -> int:
        """The number of prompts that the engines generate at once."""
        return self.config.async_training.concurrent_samples_per_replica * len(self.cluster.replicas)

    @contextmanager
    def generating(self, step: int) -> Iterator[None]:
        """Context in which a rollouter fills the queue, starting with the prompts after `step`."""
        config = self.config
        required = _required(config)
        resumed, file = self._with_kept(
            self._resumed or RollouterState.at_beginning(self.train_dataloader.state_dict()), step
        )
        self._waiting = len(resumed.queued)
        self._take_unfinished(resumed, step + len(resumed.queued) // required)
        self._supply = Supply(
            Terms(
                config,
                self.train_dataloader.dataset,
                source=self.train_dataloader.source,
                asks_greedily=self.sampling.needs_greedy,
                total_prompts=0 if config.trainer.val_only else self.total_steps * required,
                limit=config.async_training.max_outstanding(required),
                run=self._uids(),
                kept=self.kept,
            ),
            resumed=resumed,
            rollouts=self.rollouts,
            follow_replicas=self.follow_replicas,
            max_in_flight=lambda: self.max_in_flight,
            loop=self.cluster.loop,
            limit=self.cluster.restart_limit,
            file=file,
        )
        try:
            yield
        finally:
            supply, self._supply = self._supply, None
            supply.close()

    def _take_unfinished(self, resumed: RollouterState, up_to: int) -> None:
        """Have agent loops go on with what they had when an earlier driver died; `up_to`: the last version that comes
        again. In this driver they have it, and uids are others after a return to an older step."""
        if self.kept is None or self._uids_are_old:
            return
        run, complete = self.kept.run(), {sample.index for sample in resumed.queued}
        drawn = max(resumed.drawn, *(index + 1 for index in complete), 0)
        drawn += self.config.async_training.max_outstanding(_required(self.config))  # at most, when it died
        begun = {prompt.index for prompt in resumed.in_flight}.union(range(resumed.drawn, drawn)) - complete
        uids = {uid_of(run, index) for index in begun}
        asked = [
            worker.take_unfinished.remote(self.kept.directory, run, up_to, uids) for worker in self.rollouts.workers
        ]
        tokens = sum(ray.get(asked, timeout=self.config.actor_rollout_ref.rollout.control_timeout_s))
        if tokens:
            logger.info("goes on with %d tokens of unfinished responses from before the restart", tokens)

    def _uids(self) -> str:
        """Of a run; after a return to an older step others, as agent loops know samples of undone steps by them."""
        is_old, self._uids_are_old = self._uids_are_old, True
        return self.kept.run(anew=is_old) if self.kept is not None else uuid.uuid4().hex

    def _with_kept(self, resumed: RollouterState, step: int) -> tuple[RollouterState, int]:
        """`resumed`, the state after `step`, with the samples that were finished since then in the queue, and the
        number of the file where the next one is kept.

        The queue gets them in the order in which they were finished, so that the steps that are undone take the same.
        """
        if self.kept is None:
            return resumed, step
        found, unknown = self.kept.read(step), {prompt.index for prompt in resumed.in_flight}
        samples: dict[int, tuple[Sample, Amount]] = {}
        for record in found.records:
            sample = Sample(*record.content)
            if sample.index >= resumed.drawn or sample.index in unknown:  # else the checkpoint has it
                samples.pop(sample.index, None)  # of one that was generated again only the last
                samples[sample.index] = sample, record.amount
        taken = sum((amount for _, amount in samples.values()), Amount())
        found.tell(taken)
        self.count_kept(taken)
        self.count_kept(found.lost, "kept_dropped")
        return replace(resumed, queued=(*resumed.queued, *(sample for sample, _ in samples.values()))), found.last

    def take(self, now: Step) -> DataProto:
        """The samples of this step, in the order of their prompts. Raises the rollouter's errors."""
        samples = self._taken(_required(self.config), now)
        if self.config.algorithm.filter_groups.enable:
            batch = self._differing(samples, now)
        else:
            batch = self._joined_samples(samples, now)
        batch.meta_info["global_steps"] = now.number
        now.metrics |= partial_metrics(batch)
        return batch

    def _differing(self, samples: Sequence[Sample], now: Step) -> DataProto:
        """Those of `samples` whose responses differ, and as many more as it takes.

        In the place of the others, on which nobody trains, the rollouter may start new ones at once.
        """
        required = len(samples)
        filled = filling(self.config, len(self.train_dataloader))
        while True:
            batch = self._joined_samples(samples, now)
            reward = now.scored(self.reward_manager, batch, self.config.reward_model.max_failed)
            kept = filled.add(batch, reward, batches=Fraction(len(samples), required))
            others = [sample.index for sample in samples if sample.batch.non_tensor_batch["uid"][0] not in kept]
            if others:
                self.supply.replace(others)
            if filled.is_full:
                return self.sampling.full(filled, now)
            samples = self._taken(filled.missing, now)

    def _joined_samples(self, samples: Sequence[Sample], now: Step) -> DataProto:
        batch = DataProto.concat([sample.batch for sample in samples])
        for name, values in batch.meta_info.pop("metrics", {}).items():
            if name in COUNTS:
                now.metrics[COUNTS[name]] = float(sum(values))
            else:
                now.metrics[f"agent_loop/{name}/mean"] = fmean(values)
        greedy = [sample.greedy for sample in samples if sample.greedy is not None]
        if greedy:
            tensors_of(batch)[BASELINES] = self.sampling.baselines(DataProto.concat(greedy), now)
        now.metrics |= processing_metrics(samples)
        self._furthest = max(self._furthest, *(sample.index for sample in samples))
        return batch

    def _epoch(self, step: int) -> int:
        if not self.config.algorithm.filter_groups.enable:
            return super()._epoch(step)
        return self._furthest // max(len(self.train_dataloader) * _required(self.config), 1)

    def _taken(self, count: int, now: Step) -> list[Sample]:
        def look() -> None:
            if self._syncing is not None and self._syncing.done():  # the rollouter may be waiting for one that failed
                self.end_sync(now, version=now.number - 1)

        if self._waiting > 0:  # what is taken before a sync has ended would not count against the bound of staleness
            self.end_sync(now, version=now.number - 1)
            self._waiting -= count
        self.supply.step = now.number
        return self.supply.take(count, look)

    def is_sync_due(self, step: int) -> bool:
        return step % self.config.async_training.trigger_parameter_sync_step == 0 or step == self.total_steps

    def pass_on(self, now: Step, generating: Future[Any] | None) -> None:
        if self.is_sync_due(now.number):
            with now.timed("update_weights"):
                self.synchronise(now)

    def synchronise(self, now: Step) -> None:
        """Start the sync of version `now.number`. Responses in flight continue with it, or are drained before.

        Returns when the weights are copied; the previous sync has ended then.
        """
        if self.end_sync(now, version=now.number) == now.number:
            return
        generating = None if self.config.async_training.partial_rollout else self.supply.drain()
        # Not before the step's state is kept: a version of a step that is undone would be sampled from.
        self._syncing = self.cluster.syncs.begin_update(
            now.number, generating, self.supply.synced, kept=self.memory.copying
        )

    def end_sync(self, now: Step, *, version: int) -> int | None:
        """Wait for the current sync, if any, and return its version. Its metrics go to this step.

        Repeats a failed sync, as `version`, while the trainer waits; the trainer has the weights after that step.
        """
        if self._syncing is None:
            return None
        syncing, self._syncing = self._syncing, None
        metrics: Metrics | None = None
        try:
            report, metrics = self.cluster.syncs.end_update(syncing)
        except FAILED_SYNCS as exc:
            self.cluster.recovery.look(SYNC)
            logger.warning("syncing again after: %s", exc)
            report = self._sync_again(version)
        now.synced(report)
        self.follow_replicas()  # first: another rollouter, if it takes one, begins at once to ask the engines
        now.metrics |= self.supply.tell_synced() if metrics is None else metrics
        now.metrics["fully_async/count/current_param_version"] = report.version
        return report.version

    def bring_weights(self, version: int) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            with suppress(*FAILED_SYNCS):
                syncing.result()
        super().bring_weights(version)
        self.supply.tell_synced()

    def abandon_sync(self) -> None:
        """Wait for the current sync, of a step that is undone."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            with suppress(*FAILED_SYNCS):
                self.cluster.syncs.end_update(syncing)

    def validate(self, now: Step) -> None:
        self.end_sync(now, version=now.number)
        super().validate(now)

    def rollouter_state(self) -> dict[str, Any]:
        state = self.supply.state()
        return {"prompts": state.dataloader, "rollouter": state.to_plain()}

    @classmethod
    def position_in_data(cls, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if "rollouter" not in state:
            raise ConfigError(
                "the checkpoint is not one of a fully asynchronous run: it does not hold what is being generated"
            )
        return dict(state["prompts"])

    def prompts_at_beginning(self) -> dict[str, Any]:
        state = RollouterState.at_beginning(self.train_dataloader.state_dict())
        return {"prompts": state.dataloader, "rollouter": state.to_plain()}

    def restore_prompts(self, state: Mapping[str, Any]) -> None:
        super().restore_prompts(state)
        self._furthest = 0
        self._resumed = RollouterState.from_plain(state["rollouter"], self.train_dataloader.state_dict())


def partial_metrics(batch: DataProto) -> Metrics:
    """The number of responses sampled from several versions, and the most versions of one response."""
    tensors = tensors_of(batch)
    versions, generated = tensors["rollout_versions"], tensors["response_mask"].bool()
    spans = torch.tensor(
        [len(row[mask & (row != NO_VERSION)].unique()) for row, mask in zip(versions, generated, strict=True)]
    )
    return {
        "fully_async/partial/total_partial_num": float((spans > 1).sum()),
        "fully_async/partial/partial_ratio": (spans > 1).float().mean().item(),
        "fully_async/partial/max_partial_span": float(spans.max()),
    }


def processing_metrics(samples: Sequence[Sample]) -> Metrics:
    """The seconds of a step's samples, each from its request to its last token."""
    seconds = np.array([sample.seconds for sample in samples])
    numbers = {"avg": seconds.mean(), "max": seconds.max(), "min": seconds.min()}
    numbers |= {f"tp{percent}": np.percentile(seconds, percent) for percent in (50, 95, 99)}
    return {f"fully_async/processing_time/{name}": float(value) for name, value in numbers.items()}


def _required(config: PPOConfig) -> int:
    """Prompts of one trainer step."""
    return config.actor_rollout_ref.actor.ppo_mini_batch_size * config.async_training.require_batches
