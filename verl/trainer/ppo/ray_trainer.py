"""`RayPPOTrainer`: the training loop. It runs on the driver; `fit` reads as the algorithm, `cluster` computes.

prompts -> rollouts -> rewards -> log-probs, values -> advantages -> critic and actor update -> weights to the rollout
engines -> ...
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.plan.delta_choice import CHANGE_LIMITS
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.support import records
from verl.checkpoint_engine.support.memory import MemoryUse, memory_watch, most
from verl.protocol import DataProto, tensors_of
from verl.trainer.checkpoints import CheckpointDirectory, TrainerState
from verl.trainer.fleet.cluster import Cluster, sync_report_path
from verl.trainer.fleet.memory_checkpoint import MemoryCheckpoint
from verl.trainer.fleet.recovery import STEP, WEIGHTS
from verl.trainer.fleet.trainer_ranks import Loss
from verl.trainer.fleet.wanted_replicas import WantedReplicas
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.distillation import add_teacher_log_probs
from verl.trainer.ppo.dynamic_sampling import DynamicBatch, filling
from verl.trainer.ppo.even_batches import padded, without_padding
from verl.trainer.ppo.generation import HealingRollouts
from verl.trainer.ppo.going_back import Beginning, Learned, StateLost
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_staleness_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.policy_filtration import filtered
from verl.trainer.ppo.samples import SampleWriter
from verl.trainer.ppo.saves import Saves
from verl.trainer.ppo.slow_ranks import SlowRanks
from verl.trainer.ppo.validation import Validator
from verl.utils.config import ConfigError
from verl.utils.console import validation_rewards
from verl.utils.dataset import PromptLoader
from verl.utils.plain import as_float
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.utils.timing import TIMELINE_FILE, Patience, Span, SpanLog, go_back, marked_timer, write_spans
from verl.utils.tracking import Tracking
from verl.utils.tracking_services import Histogram
from verl.workers.config import PPOConfig
from verl.workers.engine.base import ROUTES
from verl.workers.reward_manager import RewardError, RewardManager, RewardOutput

Metrics = dict[str, float]
logger = logging.getLogger(__name__)


@dataclass
class Step:
    """What is measured during one training step."""

    number: int
    patience: Patience
    metrics: Metrics = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    seconds: Metrics = field(default_factory=dict)
    spans: SpanLog = field(default_factory=lambda: SpanLog("trainer"))
    syncs: SpanLog = field(default_factory=lambda: SpanLog("sync"))
    reward: RewardOutput | None = None
    """Of the batch, once it is known: it may be needed to choose the batch, and is not asked for twice."""
    is_synced: bool = False
    """The rollout engines have what the trainer has learned in it."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """The block is phase `name` of the step, or the whole step."""
        with ExitStack() as stack:
            if name != "step":
                stack.enter_context(self.patience.during(name, f"step {self.number}: {name}"))
            stack.enter_context(marked_timer(name, self.seconds, self.spans, self.number))
            yield

    def synced(self, report: SyncReport) -> None:
        """A sync has ended."""
        self.metrics |= report.metrics()
        if report.delta is not None and report.delta.tensors_by_change:
            counts = report.delta.tensors_by_change
            self.histograms["checkpoint_engine/delta/changed_fraction_of_tensors"] = Histogram(CHANGE_LIMITS, counts)
        for phase, start_s, stop_s in report.timed_laps():
            self.syncs.add(phase, start_s, stop_s, report.version)


@dataclass(frozen=True)
class TrainingResult:
    """Held-out mean reward by data source, before and after; the last step."""

    step: int
    rewards_before: dict[str, float]
    rewards_after: dict[str, float]


class RayPPOTrainer:
    """Policy-gradient training with a critic (GAE) or without one (GRPO, RLOO, REINFORCE++) in hybrid mode.

    Everything it needs is given to it, started; it ends nothing.
    """

    KEPT = "engines, agent loops and reward workers"
    """What goes on when trainer ranks are lost."""

    def __init__(
        self,
        *,
        config: PPOConfig,
        cluster: Cluster,
        rollouts: HealingRollouts,
        reward_manager: RewardManager,
        train_dataloader: PromptLoader,
        validator: Validator,
        checkpoints: CheckpointDirectory,
        tracking: Tracking,
        total_steps: int,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.rollouts = rollouts
        self.reward_manager = reward_manager
        self.train_dataloader = train_dataloader
        self.validator = validator
        self.checkpoints = checkpoints
        self.tracking = tracking
        self.total_steps = total_steps
        self.kl_ctrl = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        self.rewards_before: dict[str, float] = {}
        self.rewards_after: dict[str, float] = {}
        self._wanted_replicas = WantedReplicas(Path(config.trainer.output_dir) / "num_replicas")
        self._samples = SampleWriter(config.trainer.rollout_data_dir)
        self._patience = Patience()
        self._timeline = Path(config.trainer.output_dir) / TIMELINE_FILE
        self._asked_engines: Future[list[Span]] | None = None
        self._measured_engines: Future[list[MemoryUse]] | None = None
        actor, critic = config.actor_rollout_ref.actor.checkpoint, config.critic.checkpoint
        self.has_critic = needs_critic(config)
        self._saves = Saves(
            checkpoints,
            cluster.loop,
            in_background=actor.async_save or (self.has_critic and critic.async_save),
            stops_on_full_disk=config.trainer.on_full_disk == "stop",
        )
        self._learned: Learned | None = None
        """The last step: trainer ranks that are lost before they have left its state in memory learn it again."""
        self._caught_up = 0
        """The restart of trainer ranks that was made good last."""
        self._weights_of = 0
        """The step whose weights the trainer ranks have."""
        self._brings_weights = False
        cluster.recovery.watch(WEIGHTS, self._bring_weights)
        self._slow_ranks = SlowRanks(self._process_of)
        self._rows = chain.from_iterable(repeat(train_dataloader))
        self._needed = core_algos.needed_by(config.algorithm.adv_estimator)
        self._advantages = core_algos.get_adv_estimator_fn(config.algorithm.adv_estimator)

    @classmethod
    def adapted(cls, config: PPOConfig) -> PPOConfig:
        """What this loop makes of `config`, before anything is started. Raises ConfigError for what it cannot do."""
        prompts, generated = config.data.train_batch_size, config.data.gen_batch_size
        if prompts == 0:
            raise ConfigError(
                "data.train_batch_size must be positive, not 0, which fully asynchronous runs replace by what "
                "async_training.require_batches says"
            )
        if generated not in (None, prompts) and not config.algorithm.filter_groups.enable:
            raise ConfigError(
                f"data.gen_batch_size={generated}, but whole training batches are generated, of "
                f"data.train_batch_size={prompts} prompts: leave it out, or set algorithm.filter_groups.enable=true"
            )
        return config

    def at(self, step: int) -> Step:
        """To measure `step` with."""
        return Step(step, self._patience)

    def fit(self, resume_from: Path | None = None) -> TrainingResult:
        """Train until `total_steps`. Raises the first failure of any part, with that part's own traceback."""
        step = self.resume(resume_from) if resume_from else 0
        self._beginning = Beginning(resume_from, self.prompts_at_beginning(), self.kl_ctrl.value)
        while True:
            try:
                return self.train_after(step)
            except StateLost:
                step = self.cluster.recovery.attempt(STEP, self.go_back, failures=(Exception,), again=self.go_back)

    def train_after(self, start: int) -> TrainingResult:
        """Train from step `start` on, the state of which the trainer ranks have. Raises StateLost if they lose it."""
        self.begin_training(start)
        step = start
        for step, prompts in self.batches(start):
            now = self.at(step)
            with now.timed("step"):
                with now.timed("gen"):
                    batch = self.generate(prompts, now)
                    self.cluster.free_rollout_memory()
                batch = self.train(batch, now)
            self.report(now, batch)
        return self.result(step)

    def begin_training(self, start: int) -> None:
        """`begin`, and keep the state that the trainer ranks have. Raises StateLost if they lose it."""

        def lose(failure: Exception) -> None:
            raise StateLost from failure

        self.memory.start()
        self.cluster.recovery.attempt(STEP, lambda: self.begin(start), failures=(Exception,), again=lose)
        if not self.config.trainer.val_only:
            self.memory.keep(start)

    def train(
        self,
        batch: DataProto,
        now: Step,
        generating: Future[Any] | None = None,
        prompts_state: Callable[[], dict[str, Any]] | None = None,
    ) -> DataProto:
        """What a step needs the trainer for, from the samples to the checkpoint; the batch with all that it took.

        If trainer ranks are lost it is made again, from where they remember; the samples are not. `generating` is as
        in `update_weights`, `prompts_state` as in `test_and_save`.
        """
        kl_coef = self.kl_ctrl.value
        learned: DataProto | None = None

        def work() -> DataProto:
            nonlocal learned
            if learned is None:
                self.kl_ctrl.value = kl_coef
                self._samples.forget_after(now.number - 1)
                learned = self.learn(batch[:], now)
                self._weights_of = now.number
                self.memory.keep(now.number)
                self._learned = Learned(now, batch, kl_coef)
            if not now.is_synced:
                self.pass_on(now, generating)
                now.is_synced = True
            self.test_and_save(now, prompts_state or self.train_dataloader.state_dict)
            return learned

        def again(failure: Exception) -> DataProto:
            nonlocal learned
            if self.catch_up(now.number - 1, failure) < now.number:
                learned, now.is_synced = None, False
            return work()

        return self.cluster.recovery.attempt(STEP, work, failures=(Exception,), again=again)

    def catch_up(self, step: int, failure: Exception) -> int:
        """Have trainer ranks that were started again the state after `step` or a later one: which.

        If they died before that of `step` was in memory, they learn it once more from its batch. Raises StateLost if
        they cannot, and `failure` if they have not been lost anew: then it is not for that reason.
        """
        restarts, last = self.cluster.trainer_ranks.restarts, self._learned
        if restarts == self._caught_up:
            raise failure
        remembered = self.loss.remembered
        learns_again = last is not None and last.now.number == step and remembered == step - 1
        if remembered is None or (remembered < step and not learns_again):
            raise StateLost from failure
        self.tell_restart(remembered, "from memory")
        if last is not None and learns_again:
            self.kl_ctrl.value = last.kl_coef
            self._samples.forget_after(step - 1)
            self.learn(last.batch[:], last.now)
            self.memory.keep(step)
        self._caught_up, self._weights_of = restarts, max(remembered, step)
        return self._weights_of

    def pass_on(self, now: Step, generating: Future[Any] | None) -> None:
        """Give the rollout engines what the trainer has learned."""
        with now.timed("update_weights"):
            self.update_weights(now, generating)

    @property
    def memory(self) -> MemoryCheckpoint:
        return self.cluster.trainer_ranks.memory

    @property
    def loss(self) -> Loss:
        """The last one of trainer ranks."""
        loss = self.cluster.trainer_ranks.loss
        assert loss is not None  # who asks knows of one
        return loss

    def go_back(self, _: Exception | None = None) -> int:
        """Give trainer ranks that were started again the last state that is on disk, or else that of the beginning.

        The step to continue after.
        """
        self.memory.forget()
        self._saves.end()
        checkpoint = self.checkpoints.last or self._beginning.checkpoint
        if checkpoint is None:
            step = 0
            self.restore_prompts(self._beginning.prompts)
            self.kl_ctrl.value = self._beginning.kl_coef
        else:
            step = self.load_checkpoint(checkpoint)
        self.tracking.go_back(step)
        self.tell_restart(step, f"from {checkpoint or 'the beginning'}")
        self._learned, self._caught_up = None, self.cluster.trainer_ranks.restarts
        return step

    def tell_restart(self, step: int, source: str) -> None:
        """Say what was lost, and where the run goes on."""
        logger.warning(
            "%s; %s are kept; the trainer goes on after step %d, %s, after %.1f s",
            self.loss.what,
            self.KEPT,
            step,
            source,
            time.monotonic() - self.loss.began_s,
        )

    def learn(self, batch: DataProto, now: Step) -> DataProto:
        """One update of critic and actor; the batch with everything that it took."""
        now.metrics |= compute_staleness_metrics(batch, trainer_version=now.number - 1)
        with now.timed("reward"):
            batch = self.score(batch, now)
        asked = None if self.cluster.teachers is None else self.cluster.teachers.ask(batch)
        with self.traced(now.number):
            with now.timed("old_log_prob"):
                batch = self.add_old_log_probs(batch, now)
            with now.timed("ref"):
                batch = self.add_reference_log_probs(batch)
            if self.has_critic:
                with now.timed("values"):
                    batch = batch.union(self.cluster.actor.compute_values(batch))
            if asked is not None:
                with now.timed("teacher"):
                    now.metrics |= add_teacher_log_probs(batch, asked, self.config)
            with now.timed("adv"):
                batch = self.add_advantages(batch, now)
                learned_from = self.filtered(batch, now)
            if self.has_critic:
                with now.timed("update_critic"):
                    self.update_critic(learned_from, now)
            if now.number > self.config.trainer.critic_warmup:
                with now.timed("update_actor"):
                    self.update_actor(learned_from, now)
        now.metrics |= self._slow_ranks.look(self.cluster.actor.take_own_time())
        return without_padding(batch)

    def _process_of(self, rank: int) -> str:
        process = self.cluster.actor.processes[rank]
        return f"pid {process.pid} on {process.address}"

    @contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Have the trainer ranks write traces of the block, if `step` is one of `global_profiler.steps`."""
        profiler = self.config.global_profiler
        if step not in (profiler.steps or ()):
            yield
            return
        self.cluster.actor.start_profile(profiler.tool)
        yield
        self.cluster.actor.stop_profile(self.config.profile_directory, step)
        logger.info("traces of step %d are in %s", step, self.config.profile_directory)

    def test_and_save(self, now: Step, prompts_state: Callable[[], dict[str, Any]]) -> None:
        """Validate and write a checkpoint, where this step has to; `restore_prompts` gets that state back."""
        if now.number == self.total_steps or _every(self.config.trainer.test_freq, now.number):
            with now.timed("testing"):
                self.validate(now)
        if self.is_checkpoint_due(now.number):
            with now.timed("save_checkpoint"):
                self.save_checkpoint(now.number, prompts_state())

    def result(self, step: int) -> TrainingResult:
        if not self.rewards_after:  # nothing was left to train, or nothing was to be
            self.validate(self.at(step))
        self.write_timeline(self.at(step), last=True)
        self._saves.close()
        return TrainingResult(step, self.rewards_before, self.rewards_after)

    def begin(self, start: int) -> None:
        """Give the rollout engines the trainer's weights as version `start`, and validate them if that is asked for."""
        first, self._weights_of = self.at(start), start
        validates = self.config.trainer.val_before_train and not self.rewards_before
        self.forget_undone(start, again=("update_weights", "testing") if validates else ("update_weights",))
        logger.info("loading version %d of the weights into the rollout engines", start)
        with first.timed("update_weights"):
            self.update_weights(first)
        if validates:
            with first.timed("testing"):
                self.validate(first)
            self.rewards_before = dict(self.rewards_after)
            self.tracking.log(first.metrics, start)
        self.write_timeline(first)

    def forget_undone(self, start: int, again: Collection[str]) -> None:
        """Of what an earlier run in this directory recorded, only what is not done again counts as this run's."""
        go_back(self._timeline, start, again)
        records.carry_over(sync_report_path(self.config), lambda report: _version(report) < start)

    def batches(self, start: int) -> Iterator[tuple[int, DataProto]]:
        """(step, prompts), each prompt `rollout.n` times under one uid, until `total_steps`."""
        if not self.config.trainer.val_only:
            for step in range(start + 1, self.total_steps + 1):
                yield step, self.draw(step)

    def draw(self, step: int) -> DataProto:
        """The prompts that come next, for `step`; after the last of an epoch, the first of another."""
        prompts = DataProto.from_dict(non_tensors=next(self._rows))
        uids = [uuid.uuid4().hex for _ in range(len(prompts))]
        prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        prompts.meta_info["global_steps"] = step
        return prompts.repeat(self.config.actor_rollout_ref.rollout.n, interleave=True)

    def generate(self, prompts: DataProto, now: Step) -> DataProto:
        return self.chosen(self.joined(prompts, self._generated(prompts, now), now), now)

    def chosen(self, batch: DataProto, now: Step) -> DataProto:
        """`batch`; with dynamic sampling what differs of it, and of as many more prompts as it takes."""
        if not self.config.algorithm.filter_groups.enable:
            return batch
        filled = filling(self.config, len(self.train_dataloader))
        filled.add(batch, self.reward_manager(batch))
        while not filled.is_full:
            prompts = self.draw(now.number)
            batch = self.joined(prompts, self._generated(prompts, now), now)
            filled.add(batch, self.reward_manager(batch))
        return self.full(filled, now)

    def full(self, filled: DynamicBatch, now: Step) -> DataProto:
        """What the step learns from."""
        now.metrics |= filled.metrics
        batch, now.reward = filled.result()
        return batch

    def _generated(self, prompts: DataProto, now: Step) -> DataProto:
        with self._traced_engines(now.number):
            return self.rollouts.generate_sequences(prompts)

    @contextmanager
    def _traced_engines(self, step: int) -> Iterator[None]:
        chosen = step in (self.config.global_profiler.steps or ())
        if not (chosen and self.config.actor_rollout_ref.rollout.profiler.enable):
            yield
            return
        self.cluster.profile_rollouts(f"step_{step}")
        yield
        self.cluster.profile_rollouts(None)

    def joined(self, prompts: DataProto, generated: DataProto, now: Step, greedy: DataProto | None = None) -> DataProto:
        """`greedy`: what was generated for `greedily(prompts)`; it is generated here if it is needed and not there."""
        now.metrics |= generated.meta_info.pop("timing", {})
        baselines = None
        if self.needs_greedy:
            asked = self.greedily(prompts)
            if greedy is None:
                with now.timed("gen_max"):
                    greedy = self.rollouts.generate_sequences(asked)
            greedy.meta_info.pop("timing", None)
            baselines = self.baselines(asked.union(greedy), now)
        batch = prompts.union(generated)
        if baselines is not None:
            tensors_of(batch)[core_algos.BASELINES] = baselines
        return batch

    @property
    def needs_greedy(self) -> bool:
        return core_algos.BASELINES in self._needed

    def greedily(self, prompts: DataProto) -> DataProto:
        """Each of `prompts` once, for one response of the likeliest tokens."""
        once: DataProto = prompts[:: self.config.actor_rollout_ref.rollout.n]
        once.meta_info = {**prompts.meta_info, "greedy": True}
        return once

    def baselines(self, greedy: DataProto, now: Step) -> torch.Tensor:
        """What greedy responses earn, once for every response to their prompts."""
        rewards: torch.Tensor = self.reward_manager(greedy).reward_tensor.sum(-1)
        now.metrics["reward/greedy/mean"] = rewards.mean().item()
        return rewards.repeat_interleave(self.config.actor_rollout_ref.rollout.n)

    def score(self, batch: DataProto, now: Step) -> DataProto:
        """`token_level_scores`, and the reward function's other numbers as metrics."""
        reward = now.reward = now.reward or self.reward_manager(batch)
        tensors_of(batch)["token_level_scores"] = reward.reward_tensor
        if core_algos.COMPONENTS in self._needed:
            keys = self.config.algorithm.gdpo_reward_keys
            tensors_of(batch)[core_algos.COMPONENTS] = reward_components(reward, keys)
        now.metrics |= _means("reward_extra", reward.extra_info) | {"reward/abandoned": len(reward.abandoned)}
        self._samples.write(now.number, batch, reward)
        return self._balanced(padded(batch, self.cluster.actor.world_size))

    def add_old_log_probs(self, batch: DataProto, now: Step) -> DataProto:
        """The policy's log-probs before the update, and how far the rollout engine's are from them."""
        tensors = tensors_of(batch)
        mask = tensors["response_mask"]
        if self.config.actor_rollout_ref.actor.use_rollout_log_probs:
            tensors["old_log_probs"] = tensors["rollout_log_probs"]
            return batch
        computed = tensors_of(self.cluster.actor.compute_log_prob(batch))
        tensors["old_log_probs"], entropys = computed["old_log_probs"], computed["entropys"]
        if ROUTES in computed:
            tensors[ROUTES] = computed[ROUTES]
        if core_algos.SUM_PI_SQUARED in self._needed:
            tensors[core_algos.SUM_PI_SQUARED] = self.sum_pi_squared(batch)
        totals = core_algos.LossTotals.of(mask)
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        now.metrics["actor/entropy"] = core_algos.agg_loss(entropys, mask, mode, totals=totals).item()
        if "rollout_log_probs" in tensors:
            old, rollout = tensors["old_log_probs"], tensors["rollout_log_probs"]
            now.metrics |= core_algos.rollout_probs_diff_metrics(old, rollout, mask)
            weights, metrics = core_algos.compute_rollout_importance_weights(
                old, rollout, mask, self.config.algorithm.rollout_correction
            )
            now.metrics |= metrics
            if weights is not None:
                tensors["rollout_is_weights"] = weights
        return batch

    def sum_pi_squared(self, batch: DataProto) -> torch.Tensor:
        """The sum over the vocabulary of squared probabilities, [B, R], from two log-probs of the same token.

        With z = logits / temperature, log pi is z - lse(z), and at half the temperature 2 z - lse(2 z); the sum is
        exp(lse(2 z) - 2 lse(z)). So every training engine can tell it, for one more pass.
        """
        temperature = self.config.actor_rollout_ref.rollout.temperature
        sharper = DataProto(batch.batch, batch.non_tensor_batch, {**batch.meta_info, "temperature": temperature / 2})
        at_half: torch.Tensor = tensors_of(self.cluster.actor.compute_log_prob(sharper))["old_log_probs"]
        log_prob: torch.Tensor = tensors_of(batch)["old_log_probs"]
        return (2.0 * log_prob - at_half).exp().clamp(max=1.0)

    def add_reference_log_probs(self, batch: DataProto) -> DataProto:
        if not needs_reference(self.config):
            return batch
        return batch.union(self.cluster.actor.compute_ref_log_prob(batch))

    def add_advantages(self, batch: DataProto, now: Step) -> DataProto:
        """Rewards (with the KL penalty if that belongs there) become advantages, by groups of one prompt."""
        tensors, algorithm = tensors_of(batch), self.config.algorithm
        rewards = tensors["token_level_scores"]
        if algorithm.use_kl_in_reward:
            rewards, metrics = core_algos.apply_kl_penalty(
                rewards,
                tensors["old_log_probs"],
                tensors["ref_log_prob"],
                tensors["response_mask"],
                kl_ctrl=self.kl_ctrl,
                kl_penalty=algorithm.kl_penalty,
            )
            now.metrics |= metrics
        tensors["token_level_rewards"] = rewards
        tensors["advantages"], tensors["returns"] = self._advantages(
            token_level_rewards=rewards,
            response_mask=tensors["response_mask"],
            index=batch.non_tensor_batch["uid"],
            config=algorithm,
            **{name: tensors.get(name, None) for name in self._needed},
        )
        self.reject(batch, now)
        return batch

    def reject(self, batch: DataProto, now: Step) -> None:
        """Leave out of the update what the rollout engine's policy and the trainer's are too far apart for."""
        tensors, correction = tensors_of(batch), self.config.algorithm.rollout_correction
        if self.config.actor_rollout_ref.actor.use_rollout_log_probs or not correction.rejects:
            return  # the loss does it, with the policy as it is then
        tensors["response_mask"], metrics = core_algos.rejected(
            tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"], correction
        )
        now.metrics |= metrics

    def filtered(self, batch: DataProto, now: Step) -> DataProto:
        """What updates see of `batch`: all of it, or with policy filtration what is drawn from it."""
        if not self.config.algorithm.use_pf_ppo:
            return batch
        drawn, metrics = filtered(batch, self.config.algorithm.pf_ppo, self.config.trainer.seed + now.number)
        now.metrics |= metrics
        return self._balanced(padded(drawn, self.config.trainer.world_size))

    def update_critic(self, batch: DataProto, now: Step) -> None:
        now.metrics |= self.cluster.actor.update_critic(batch)[0]

    def update_actor(self, batch: DataProto, now: Step) -> None:
        now.metrics |= self.cluster.actor.update_actor(batch)[0]

    def update_weights(self, now: Step, generating: Future[Any] | None = None) -> None:
        """The trainer's weights become version `now.number` of every rollout engine, once `generating` is done."""
        now.synced(self.cluster.update_weights(now.number, generating))
        self.follow_replicas()

    def _sync_again(self, version: int) -> SyncReport:
        """With trainer ranks that may be lost. They have the weights after step `version`."""

        def sync() -> SyncReport:
            return self.cluster.update_weights(version)

        def again(failure: Exception) -> SyncReport:
            self.catch_up(version, failure)
            return sync()

        return self.cluster.recovery.attempt(STEP, sync, failures=(Exception,), again=again)

    def _bring_weights(self) -> int:
        """If no engine is in service, and none could be started again because no rollout node has weights for it, bring
        them the trainer's: how many are in service then.

        Raises CheckpointEngineError if none is.
        """
        if self.cluster.is_serving:
            return 0
        if self._brings_weights:
            raise CheckpointEngineError("no rollout engine is in service and none could be restarted")
        logger.warning("no rollout engine is in service; syncing version %d from the trainer", self._weights_of)
        self._brings_weights = True
        try:
            self.bring_weights(self._weights_of)
        finally:
            self._brings_weights = False
        return len(self.cluster.server_handles)

    def bring_weights(self, version: int) -> None:
        """Make them version `version` of all engines, between two syncs that are due."""
        self._sync_again(version)
        self.follow_replicas()

    def follow_replicas(self) -> None:
        """Send requests to the replicas that are in service now; begin to add or remove some if that is asked for."""
        count = self._wanted_replicas.changed()
        if count is not None:
            try:
                self.cluster.resize(count)
            except ConfigError as exc:
                logger.warning("%s is ignored: %s", self._wanted_replicas.path, exc)
        self.rollouts.set_servers(self.cluster.server_handles)

    def validate(self, now: Step) -> None:
        now.metrics |= self.validator.validate(now.number)
        self.rewards_after = validation_rewards(now.metrics)

    def save_checkpoint(self, step: int, prompts_state: dict[str, Any]) -> None:
        state = TrainerState(step, prompts_state, self.kl_ctrl.value, self.rewards_before)
        ranks = self.cluster.actor

        def begin(directory: Path) -> None:
            ranks.save_checkpoint(str(directory / "actor"))
            if self.has_critic:
                ranks.save_critic_checkpoint(str(directory / "critic"))

        self._saves.save(state, begin, lambda: ranks.submit("checkpoint_written"), wait=step == self.total_steps)

    def resume(self, path: Path) -> int:
        """The step to continue after."""
        logger.info("resuming from %s", path)
        return self.load_checkpoint(path)

    def load_checkpoint(self, path: Path) -> int:
        """Give the trainer ranks that state; the step to continue after."""
        state = self.checkpoints.read(path)
        self.cluster.actor.load_checkpoint(str(path / "actor"))
        if self.has_critic:
            self.cluster.actor.load_critic_checkpoint(str(path / "critic"))
        self.restore_prompts(state.dataloader)
        self.kl_ctrl.value = state.kl_coef
        self.rewards_before = state.rewards_before
        return state.step

    @classmethod
    def position_in_data(cls, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of what a checkpoint says about prompts, the state of the data loader.

        Raises ConfigError for a checkpoint of a loop that this one cannot go on from.
        """
        if "rollouter" in state:
            raise ConfigError("the checkpoint is one of a fully asynchronous run: go on with fully_async_main")
        return state

    def prompts_at_beginning(self) -> dict[str, Any]:
        """For `restore_prompts`, where there is no checkpoint."""
        return self.train_dataloader.state_dict()

    def restore_prompts(self, state: Mapping[str, Any]) -> None:
        """Go on with the prompts that come after those of a checkpoint."""
        self.train_dataloader.load_state_dict(self.position_in_data(state))
        self._rows = chain.from_iterable(repeat(self.train_dataloader))

    def is_checkpoint_due(self, step: int) -> bool:
        """Every `save_freq` steps, and at the end of a run that saves at all."""
        frequency = self.config.trainer.save_freq
        return _every(frequency, step) or (frequency > 0 and step == self.total_steps)

    def report(self, now: Step, batch: DataProto) -> None:
        now.metrics |= compute_data_metrics(batch)
        now.metrics |= compute_timing_metrics(batch, now.seconds)
        now.metrics |= compute_throughput_metrics(batch, now.seconds, self.cluster.actor.world_size)
        now.metrics |= {"training/global_step": now.number, "training/epoch": self._epoch(now.number)}
        now.metrics["training/attempt"] = self.cluster.trainer_ranks.restarts
        now.metrics["training/ranks"] = self.cluster.actor.world_size
        now.metrics |= {"rollout/restarts": self.cluster.restarts, "rollout/replicas": len(self.cluster.replicas)}
        now.metrics |= self.memory_metrics()
        now.metrics |= self._saves.metrics()
        self.tracking.log(now.metrics, now.number, now.histograms)
        self.write_timeline(now)
        self._saves.publish()  # whoever resumes from it finds the records of its step

    def memory_metrics(self) -> dict[str, float]:
        """Of the driver, and the largest of the engines, as they were one step before."""
        metrics = memory_watch().since_start("driver").metrics("driver")
        if self._measured_engines is not None and (use := most(self._measured_engines.result())) is not None:
            metrics |= use.metrics("engine")
        self._measured_engines = self.cluster.begin_measure_engines()
        return metrics

    def write_timeline(self, now: Step, *, last: bool = False) -> None:
        """Who was busy with what: trainer and syncs in this step, the engines until the call before."""
        engines = [] if self._asked_engines is None else self._asked_engines.result()
        write_spans(self._timeline, [*now.spans.take(), *now.syncs.take(), *engines])
        self._asked_engines = None if last else self.cluster.begin_take_spans()

    def _epoch(self, step: int) -> int:
        if self.config.algorithm.filter_groups.enable:  # a step may draw several batches
            state = self.train_dataloader.state_dict()
            epoch: int = state["epoch"]
            return epoch - 1 if state["position"] == 0 else epoch
        return (step - 1) // max(len(self.train_dataloader), 1)

    def _balanced(self, batch: DataProto) -> DataProto:
        """Reorder so that every rank's part has about the same number of tokens."""
        if not self.config.trainer.balance_batch:
            return batch
        lengths = tensors_of(batch)["attention_mask"].sum(-1).tolist()
        parts = get_seqlen_balanced_partitions(lengths, self.cluster.actor.world_size, equal_size=True)
        batch.reorder(torch.tensor([index for part in parts for index in part]))
        return batch


def _version(report: Mapping[str, Any]) -> float:
    version = report.get("version")
    return version if isinstance(version, int) else inf


def _every(frequency: int, step: int) -> bool:
    return frequency > 0 and step % frequency == 0


def needs_reference(config: PPOConfig) -> bool:
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def needs_critic(config: PPOConfig) -> bool:
    return core_algos.needs_values(config.algorithm.adv_estimator)


def reward_components(reward: RewardOutput, keys: Sequence[str]) -> torch.Tensor:
    """The numbers that the reward function gave under `keys`, [B, len(keys)].

    Raises RewardError for a response without one of them.
    """
    components = torch.zeros(len(reward.responses), len(keys))
    for column, key in enumerate(keys):
        for row, value in enumerate(reward.extra_info.get(key, [None] * len(components))):
            number = as_float(value)
            if number is None or not isfinite(number):
                raise RewardError(
                    f"algorithm.gdpo_reward_keys: the reward function returned {key}={value!r} for sample {row}, not a "
                    f"finite number; it has {', '.join(reward.extra_info) or 'no numbers beside the score'}"
                )
            components[row, column] = number
    return components


def _means(prefix: str, columns: Mapping[str, list[Any]]) -> Metrics:
    """Means of the columns that hold numbers."""
    found = {
        name: [number for each in values if (number := as_float(each)) is not None] for name, values in columns.items()
    }
    with np.errstate(invalid="ignore"):  # of infinities of both signs
        return {f"{prefix}/{name}/mean": float(np.mean(numbers)) for name, numbers in found.items() if numbers}
