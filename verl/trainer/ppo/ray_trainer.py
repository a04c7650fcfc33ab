"""`RayPPOTrainer`: the training loop. It runs on the driver; `cluster` has the processes that compute.

prompts -> rollouts -> rewards -> log-probs, values -> advantages -> critic and actor update -> weights to the rollout
engines -> ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from verl import envs
from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.support.memory import in_words
from verl.protocol import DataProto
from verl.trainer.checkpoints import CheckpointDirectory, TrainerState
from verl.trainer.fleet.cluster import Cluster
from verl.trainer.fleet.memory_checkpoint import MemoryCheckpoint
from verl.trainer.fleet.recovery import WEIGHTS
from verl.trainer.fleet.wanted_replicas import WantedReplicas
from verl.trainer.kept_samples import Amount, KeptSamples, discard, discard_calls
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.distillation import add_teacher_log_probs
from verl.trainer.ppo.even_batches import without_padding
from verl.trainer.ppo.experience import Experience
from verl.trainer.ppo.generation import HealingRollouts
from verl.trainer.ppo.going_back import Beginning, GoingBack, Learned
from verl.trainer.ppo.metric_utils import compute_staleness_metrics
from verl.trainer.ppo.needs import needs_critic
from verl.trainer.ppo.progress import Asked
from verl.trainer.ppo.reports import Reports
from verl.trainer.ppo.samples import SampleWriter
from verl.trainer.ppo.sampling import Sampling
from verl.trainer.ppo.saves import Saves
from verl.trainer.ppo.settled import of_whole_batches
from verl.trainer.ppo.skipped_steps import Diverged, SkippedSteps
from verl.trainer.ppo.slow_ranks import SlowRanks
from verl.trainer.ppo.step import Metrics, Step
from verl.trainer.ppo.traces import Traces
from verl.trainer.ppo.validation import Validator
from verl.trainer.ppo.verl_names import refuse_arguments, refuse_overrides
from verl.trainer.run_identity import identity_of
from verl.utils.config import ConfigError
from verl.utils.console import validation_rewards
from verl.utils.dataset import PromptLoader
from verl.utils.timing import Patience
from verl.utils.tracking import Tracking
from verl.workers.config import PPOConfig
from verl.workers.reward_manager import RewardManager

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """The last step, and the held-out mean reward by data source before and after training."""

    step: int
    rewards_before: dict[str, float]
    rewards_after: dict[str, float]


class RayPPOTrainer:
    """Policy-gradient training with a critic (GAE) or without one (GRPO, RLOO, REINFORCE++) in hybrid mode.

    The caller starts all parts and passes them in; the trainer ends none of them.
    """

    KEPT = "engines, agent loops and reward workers"
    """For the log: what survives the loss of trainer ranks."""

    GENERATES_AHEAD = False
    """Whether samples wait for the trainer, so that `rollout.keep_tokens` has something to keep."""

    kept: KeptSamples | None = None
    """Samples that are in no checkpoint yet, during `fit`."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Raises ConfigError for a class that is written for verl's trainer."""
        super().__init_subclass__(**more)
        refuse_overrides(cls)

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Raises ConfigError for arguments of verl's trainer."""
        refuse_arguments(cls, given)
        return super().__new__(cls)

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
        self.kept_metrics: Metrics = {}
        """Of the samples that were taken from `kept`, for the next step."""
        self._wanted_replicas = WantedReplicas(Path(config.trainer.output_dir) / "num_replicas")
        self._samples = SampleWriter(config.trainer.rollout_data_dir)
        phases = {name: partial(Asked, ask) for name, ask in self.who_knows_progress().items()}
        self._patience = Patience(show=lambda text: self.tracking.show_phase(text), progress=phases)
        actor, critic = config.actor_rollout_ref.actor.checkpoint, config.critic.checkpoint
        self.has_critic = needs_critic(config)
        self._saves = Saves(
            checkpoints,
            cluster.loop,
            in_background=actor.async_save or (self.has_critic and critic.async_save),
            stops_on_full_disk=config.trainer.on_full_disk == "stop",
        )
        self.going_back = GoingBack(cluster, kept=self.KEPT, learn=self.learn_from, restore=self.restore)
        self._brings_weights = False
        cluster.recovery.watch(WEIGHTS, self._bring_weights)
        self._slow_ranks = SlowRanks(self._process_of)
        self._skipped_steps = SkippedSteps(config.trainer.max_skipped_steps)
        self.traces, self.reports = Traces(config, cluster), Reports(config, cluster)
        self.sampling = Sampling(config, rollouts, reward_manager, train_dataloader, self.traces)
        self._experience = Experience(config, cluster, reward_manager, self.kl_ctrl, self._samples)

    @classmethod
    def adapted(cls, config: PPOConfig) -> PPOConfig:
        """`config` with this loop's changes, before any process starts. Raises ConfigError for unsupported settings."""
        return of_whole_batches(config)

    # ---- a run

    def fit(self, resume_from: Path | None = None) -> TrainingResult:
        """Train until `total_steps`. Raises the first failure of any part, with that part's own traceback."""
        step = self.resume(resume_from) if resume_from else 0
        self._beginning = Beginning(resume_from, self.prompts_at_beginning(), self.kl_ctrl.value)
        self.kept = self._keeping(resume_from)
        try:
            return self.going_back.until_done(self.train_after, step)
        except Diverged:
            self._end_keeping()  # with the same samples it would come to the same
            raise

    def _keeping(self, resume_from: Path | None) -> KeptSamples | None:
        """What `rollout.keep_tokens` keeps. Deletes what the run will not take."""
        config = self.config
        continues = (
            config.trainer.resume_mode != "disable" if resume_from is None else self.checkpoints.has(resume_from)
        )
        keeps = self.GENERATES_AHEAD and config.actor_rollout_ref.rollout.keep_tokens == "auto"
        if not (continues and keeps):
            discard(self.checkpoints.root, before_s=envs.supervised_since() if keeps else None)
        if not keeps:
            return None
        kept = KeptSamples(
            self.checkpoints.root, identity_of(config, type(self).__name__, self.train_dataloader.source)
        )
        logger.info(
            "samples that no checkpoint has yet are kept in %s, at most %s (rollout.keep_tokens)",
            kept.directory,
            in_words(kept.most_nbytes),
        )
        return kept

    def train_after(self, start: int) -> TrainingResult:
        """Train on after step `start`, whose state the trainer ranks hold. Raises StateLost if they lose it."""
        self.begin_training(start)
        step = start
        for step, prompts in self.batches(start):
            now = self.at(step)
            with now.timed("step"):
                with now.timed("gen"):
                    batch = self.sampling.generate(prompts, now)
                    self.cluster.free_rollout_memory()
                batch = self.train(batch, now)
            self.report(now, batch)
        return self.result(step)

    def begin_training(self, start: int) -> None:
        """Call `begin`, then keep the trainer ranks' state in memory. Raises StateLost if they lose it."""
        self.memory.start()
        self.going_back.begin(lambda: self.begin(start))
        if not self.config.trainer.val_only:
            self.memory.keep(start)

    def begin(self, start: int) -> None:
        """Sync the trainer's weights to the rollout engines as version `start`; validate with `val_before_train`."""
        first, self.going_back.weights_of = self.at(start), start
        validates = self.config.trainer.val_before_train and not self.rewards_before
        self.reports.forget_undone(start, again=("update_weights", "testing") if validates else ("update_weights",))
        logger.info("loading version %d of the weights into the rollout engines", start)
        with first.timed("update_weights"):
            self.update_weights(first)
        if validates:
            with first.timed("testing"):
                self.validate(first)
            self.rewards_before = dict(self.rewards_after)
            self.tracking.log(first.metrics, start)
        self.reports.write_timeline(first)

    def batches(self, start: int) -> Iterator[tuple[int, DataProto]]:
        """Yield (step, prompts) up to `total_steps`; each prompt is repeated `rollout.n` times under one uid."""
        if not self.config.trainer.val_only:
            for step in range(start + 1, self.total_steps + 1):
                yield step, self.sampling.draw(step)

    def at(self, step: int) -> Step:
        """The object that measures `step`."""
        return Step(step, self._patience)

    def result(self, step: int) -> TrainingResult:
        if not self.rewards_after:  # nothing was left to train, or nothing was to be
            self.validate(self.at(step))
        self.reports.write_timeline(self.at(step), last=True)
        self._saves.close()
        self._end_keeping()
        discard_calls(self.checkpoints.root)
        return TrainingResult(step, self.rewards_before, self.rewards_after)

    def _end_keeping(self) -> None:
        if self.kept is not None:
            self.kept.end()

    def count_kept(self, amount: Amount, what: str = "kept") -> None:
        """Add to the metrics of the next step what was taken from `kept`; or, as `kept_dropped`, what could not be."""
        for name, value in amount.metrics(what).items():
            self.kept_metrics[name] = self.kept_metrics.get(name, 0.0) + value

    # ---- a step

    def train(
        self,
        batch: DataProto,
        now: Step,
        generating: Future[Any] | None = None,
        prompts_state: Callable[[], dict[str, Any]] | None = None,
    ) -> DataProto:
        """Everything after generation: update, weight sync, validation, checkpoint. Returns the batch with all tensors.

        If trainer ranks are lost, repeats what they do not remember, with the same samples. `generating` is as in
        `update_weights`, `prompts_state` as in `test_and_save`.
        """

        def then() -> None:
            if not now.is_synced:
                self.pass_on(now, generating)
                now.is_synced = True
            self.test_and_save(now, prompts_state or self.train_dataloader.state_dict)

        return self.going_back.train(Learned(now, batch, self.kl_ctrl.value), then)

    def learn_from(self, learned: Learned) -> DataProto:
        """Call `learn` with the KL coefficient and the batch of before the step; may be repeated."""
        self.kl_ctrl.value = learned.kl_coef
        self._samples.forget_after(learned.now.number - 1)
        return self.learn(learned.batch[:], learned.now)

    def learn(self, batch: DataProto, now: Step) -> DataProto:
        """Update critic and actor once. Returns the batch with the tensors of the update, without padding."""
        now.metrics |= compute_staleness_metrics(batch, trainer_version=now.number - 1)
        with now.timed("reward"):
            batch = self._experience.score(batch, now)
        asked = None if self.cluster.teachers is None else self.cluster.teachers.ask(batch)
        with self.traces.of_ranks(now.number):
            with now.timed("old_log_prob"):
                batch = self._experience.add_old_log_probs(batch, now)
            with now.timed("ref"):
                batch = self._experience.add_reference_log_probs(batch)
            if self.has_critic:
                with now.timed("values"):
                    batch = batch.union(self.cluster.actor.compute_values(batch))
            if asked is not None:
                with now.timed("teacher"):
                    now.metrics |= add_teacher_log_probs(batch, asked, self.config)
            with now.timed("adv"):
                batch = self._experience.add_advantages(batch, now)
                learned_from = self._experience.filtered(batch, now)
            if self.has_critic:
                with now.timed("update_critic"):
                    now.metrics |= self.cluster.actor.update_critic(learned_from)[0]
            if now.number > self.config.trainer.critic_warmup:
                with now.timed("update_actor"):
                    now.metrics |= self.cluster.actor.update_actor(learned_from)[0]
        self._look_for_skipped(now)
        now.metrics |= self._slow_ranks.look(self.cluster.actor.take_own_time())
        return without_padding(batch)

    def _look_for_skipped(self, now: Step) -> None:
        """Raises Diverged. The metrics of that step are told first."""
        try:
            self._skipped_steps.look(now.number, now.metrics)
        except Diverged:
            self.tracking.log(now.metrics, now.number, now.histograms)
            raise
        finally:
            self.checkpoints.keeps_all = self._skipped_steps.in_a_row > 0

    def pass_on(self, now: Step, generating: Future[Any] | None) -> None:
        """Sync the trainer's new weights to the rollout engines, as phase `update_weights`."""
        with now.timed("update_weights"):
            self.update_weights(now, generating)

    def update_weights(self, now: Step, generating: Future[Any] | None = None) -> None:
        """Sync the trainer's weights to all rollout engines as version `now.number`, once `generating` is done."""
        now.synced(self.cluster.syncs.update_weights(now.number, generating))
        self.follow_replicas()

    def _sync_again(self, version: int) -> SyncReport:
        """With trainer ranks that may be lost. They have the weights after step `version`."""

        def sync() -> SyncReport:
            return self.cluster.syncs.update_weights(version)

        def again(failure: Exception) -> SyncReport:
            self.going_back.catch_up(version, failure)
            return sync()

        return self.going_back.attempt(sync, again=again)

    def _bring_weights(self) -> int:
        """If no engine is in service, and none could be started again because no rollout node has weights for it, bring
        them the trainer's: how many are in service then.

        Raises CheckpointEngineError if none is.
        """
        if self.cluster.is_serving:
            return 0
        if self._brings_weights:
            raise CheckpointEngineError("no rollout engine is in service and none could be restarted")
        version = self.going_back.weights_of
        logger.warning("no rollout engine is in service; syncing version %d from the trainer", version)
        self._brings_weights = True
        try:
            self.bring_weights(version)
        finally:
            self._brings_weights = False
        return len(self.cluster.server_handles)

    def bring_weights(self, version: int) -> None:
        """Sync the trainer's weights to all engines as `version`, outside the regular syncs."""
        self._sync_again(version)
        self.follow_replicas()

    def follow_replicas(self) -> None:
        """Send requests to the replicas now in service; start resizing if the file `num_replicas` has changed."""
        count = self._wanted_replicas.changed()
        if count is not None:
            try:
                self.cluster.resize(count)
            except ConfigError as exc:
                logger.warning("%s is ignored: %s", self._wanted_replicas.path, exc)
        self.rollouts.set_servers(self.cluster.server_handles)

    def test_and_save(self, now: Step, prompts_state: Callable[[], dict[str, Any]]) -> None:
        """Validate and save a checkpoint, if due. `restore_prompts` later gets what `prompts_state` returns."""
        if now.number == self.total_steps or _every(self.config.trainer.test_freq, now.number):
            with now.timed("testing"):
                self.validate(now)
        if self.is_checkpoint_due(now.number):
            with now.timed("save_checkpoint"):
                self.save_checkpoint(now.number, prompts_state())

    def validate(self, now: Step) -> None:
        now.metrics |= self.validator.validate(now.number)
        self.rewards_after = validation_rewards(now.metrics)

    def is_checkpoint_due(self, step: int) -> bool:
        """Every `save_freq` steps, and at the end of a run that saves at all."""
        frequency = self.config.trainer.save_freq
        return _every(frequency, step) or (frequency > 0 and step == self.total_steps)

    def save_checkpoint(self, step: int, prompts_state: dict[str, Any]) -> None:
        state = TrainerState(step, prompts_state, self.kl_ctrl.value, self.rewards_before)
        ranks = self.cluster.actor

        def begin(directory: Path) -> None:
            ranks.save_checkpoint(str(directory / "actor"))
            if self.has_critic:
                ranks.save_critic_checkpoint(str(directory / "critic"))

        self._saves.save(state, begin, lambda: ranks.submit("checkpoint_written"), wait=step == self.total_steps)

    def report(self, now: Step, batch: DataProto) -> None:
        now.metrics |= self.reports.metrics(batch, now, epoch=self._epoch(now.number))
        now.metrics |= self._saves.metrics() | self.kept_metrics
        self.kept_metrics = {}
        self.tracking.log(now.metrics, now.number, now.histograms)
        self.reports.write_timeline(now)
        self._saves.publish()  # whoever resumes from it finds the records of its step
        if self.kept is not None and self.checkpoints.last_step is not None:
            self.kept.forget_before(self.checkpoints.last_step)

    # ---- where a run goes on

    def resume(self, path: Path) -> int:
        """Load the checkpoint `path`; returns its step."""
        logger.info("resuming from %s", path)
        return self.load_checkpoint(path)

    def load_checkpoint(self, path: Path) -> int:
        """Have the trainer ranks and this loop load the checkpoint `path`; returns its step."""
        state = self.checkpoints.read(path)
        self.cluster.actor.load_checkpoint(str(path / "actor"))
        if self.has_critic:
            self.cluster.actor.load_critic_checkpoint(str(path / "critic"))
        self.restore_prompts(state.dataloader)
        self.kl_ctrl.value = state.kl_coef
        self.rewards_before = state.rewards_before
        return state.step

    def restore(self) -> tuple[int, Path | None]:
        """Have restarted trainer ranks load the last checkpoint, or else the state of the beginning.

        Returns the step of that state, and the checkpoint or None.
        """
        self._saves.end()
        checkpoint = self.checkpoints.last or self._beginning.checkpoint
        if checkpoint is None:
            step = 0
            self.restore_prompts(self._beginning.prompts)
            self.kl_ctrl.value = self._beginning.kl_coef
        else:
            step = self.load_checkpoint(checkpoint)
        self.tracking.go_back(step)
        return step, checkpoint

    def restore_prompts(self, state: Mapping[str, Any]) -> None:
        """Continue with the prompts after those of a checkpoint."""
        self.sampling.continue_after(self.position_in_data(state))

    def prompts_at_beginning(self) -> dict[str, Any]:
        """The data loader's state before the first step, for `restore_prompts` without a checkpoint."""
        return self.train_dataloader.state_dict()

    @classmethod
    def position_in_data(cls, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data loader's state in a checkpoint's state of prompts.

        Raises ConfigError for a checkpoint of another loop that this one cannot continue.
        """
        if "rollouter" in state:
            raise ConfigError("the checkpoint is of a fully asynchronous run: continue with fully_async_main")
        return state

    # ---- helpers

    def who_knows_progress(self) -> dict[str, Callable[[], Sequence[Any]]]:
        """By phase of a step: the function that asks its workers for their progress, as `Asked` needs it."""

        def of_answers(*, validate: bool) -> list[Any]:
            return [worker.progress.remote(validate=validate) for worker in self.rollouts.workers]

        def of_rank() -> list[Any]:
            return [self.cluster.actor.workers[0].progress.remote()]

        answers = {name: partial(of_answers, validate=name == "testing") for name in ("gen", "gen_max", "testing")}
        return {**answers, "update_actor": of_rank, "update_critic": of_rank}

    @property
    def memory(self) -> MemoryCheckpoint:
        return self.cluster.trainer_ranks.memory

    def _process_of(self, rank: int) -> str:
        process = self.cluster.actor.processes[rank]
        return f"pid {process.pid} on {process.address}"

    def _epoch(self, step: int) -> int:
        if self.config.algorithm.filter_groups.enable:  # a step may draw several batches
            state = self.train_dataloader.state_dict()
            epoch: int = state["epoch"]
            return epoch - 1 if state["position"] == 0 else epoch
        return (step - 1) // max(len(self.train_dataloader), 1)


def _every(frequency: int, step: int) -> bool:
    return frequency > 0 and step % frequency == 0
