"""The trainer's Ray worker: one rank of the policy, of the frozen reference policy, or of both."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

from verl.checkpoint_engine.compat.torch import limit_collectives
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.support.admission import Doorkeeper, listening_here
from verl.checkpoint_engine.support.memory import memory_watch
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.device import (
    allocated,
    distributed_backend,
    local_device,
    resolve_device,
    rng_state,
    seed_everything,
    set_rng_state,
)
from verl.utils.progress import Progress
from verl.workers import process_group
from verl.workers.actor_loss import ActorLoss
from verl.workers.config import (
    ActorRolloutRefConfig,
    CheckpointConfig,
    DistillationLossConfig,
    RefConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
)
from verl.workers.distilled_loss import DistilledLoss
from verl.workers.engine.background import BackgroundWriter, Written
from verl.workers.engine.base import ROUTES, LossFunction, RecordsRoutes, TrainEngine
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.registry import TrainEngineRegistry, new_engine
from verl.workers.engine.snapshots import Places, Rememberable, Reshardable, State, placed_under, under
from verl.workers.engine.training_state import SavesInBackground
from verl.workers.memory_checkpoint.worker import RNG, RememberedWorker
from verl.workers.mini_batches import iterate_mini_batches, mini_batch_size_per_rank, num_mini_batches, shuffler
from verl.workers.own_time import HasOwnBlocks, Owns, OwnTime, clock_of
from verl.workers.profiling import RankProfiler
from verl.workers.update_costs import UpdateCosts
from verl.workers.weight_sync.publisher import WeightPublisher

logger = logging.getLogger(__name__)

ROLES = ("actor", "ref", "actor_ref", "actor_rollout", "actor_rollout_ref")


class ActorRolloutRefWorker(WeightPublisher, RememberedWorker):
    """The worker of one rank. The driver calls `init_model` first; nearly every method is a collective of the group.

    `role`: the group holds a policy that is trained (`actor`), a reference policy (`ref`), or both. `rollout` in a role
    means that rollout engines get weights from it, and has no effect here.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        *,
        loss_fn: LossFunction | None = None,
        device: str | None = None,
        seed: int = 1,
        correction: RolloutCorrectionConfig | None = None,
        distillation: DistillationLossConfig | None = None,
    ) -> None:
        """`config.model.path` is a Hugging Face directory. `loss_fn` replaces `ActorLoss`; it must be picklable.
        `correction` is for `ActorLoss`; with `distillation` the actor learns from teachers, too.

        `device` is cpu, cuda, npu, or None for what is there. `config.nccl_timeout` bounds every collective.
        Raises ConfigError for what can be known to fail before a process group exists.
        """
        if config.model.external_lib:  # it may register the loss that the actor is about to look up
            importlib.import_module(config.model.external_lib)
        if role not in ROLES:
            raise ConfigError(f"unknown role {role!r}.{did_you_mean(role, ROLES)}")
        TrainEngineRegistry.require(config.actor.strategy)
        if config.rollout.temperature <= 0:
            raise ConfigError(f"training needs rollout.temperature above 0, not {config.rollout.temperature}")
        self.config = config
        self.device_name = resolve_device(device)
        parts = role.split("_")
        self._has_actor, self._has_ref = "actor" in parts, "ref" in parts
        self._kept_wide: frozenset[str] = frozenset()
        """Tensors that rollout engines keep in float32."""
        self._loss_fn = loss_fn
        if loss_fn is None and self._has_actor:
            self._loss_fn = (
                ActorLoss(config.actor, correction)
                if distillation is None
                else DistilledLoss(config.actor, distillation, correction)
            )
        self._mini_batch_size = (
            mini_batch_size_per_rank(config.actor.ppo_mini_batch_size, config.rollout.n, self.world_size)
            if self._has_actor
            else Fraction(1)
        )
        self._seed = seed
        self._timeout = timedelta(seconds=config.nccl_timeout)
        self._doors: Doorkeeper | None = None
        """Of the process group, if it is this worker's own."""
        self._actor: TrainEngine | None = None
        self._ref: TrainEngine | None = None
        self._background: BackgroundWriter | None = None
        self.own_time = OwnTime(clock_of(self.device_name))
        self._profiler = RankProfiler(self.device_name)
        self._costs = UpdateCosts(config, self.device_name, self.local_rank)
        self._progress: Progress | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def missing_files(self, paths: list[str]) -> list[str]:
        """The `paths` that do not exist on this rank's host. Not a collective; may be called before `init_model`."""
        return [path for path in paths if not Path(path).exists()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Join the group's process group, build the engines."""
        device = local_device(self.device_name, self.local_rank)
        known = listening_here().keys()
        if not dist.is_initialized():
            self._doors = process_group.join(self.rank_info, distributed_backend(self.device_name), self._timeout)
        if self.device_name != "cpu":
            memory_watch().device = partial(allocated, self.device_name)
        seed_everything(self._seed + self.rank)
        config = self.config
        if config.rollout.full_determinism:
            torch.use_deterministic_algorithms(True)
        if self._has_actor:
            self._actor = new_engine(
                config.actor.strategy,
                fsdp=config.actor.fsdp_config,
                megatron=config.actor.megatron,
                model_config=config.model,
                optim_config=config.actor.optim,
                grad_clip=config.actor.grad_clip,
                device=device,
                seed=self._seed,
                before_step=self.before_step,
            )
            self._actor.build()
            self.watch_own_time(self._actor)
        if self._has_ref:
            self._ref = new_engine(
                config.actor.strategy,
                fsdp=config.ref.fsdp_config,
                megatron=config.actor.megatron,  # as RefMegatronConfig says
                model_config=config.model,
                device=device,
            )
            self._ref.build()
            self.watch_own_time(self._ref)
        if self.checkpoints_saved_async:
            self._background = BackgroundWriter(local_ranks=self.local_world_size, timeout_s=self.config.nccl_timeout)
        if self._doors is not None:
            self._doors.take_over(known)
        self._limit_collectives()

    def watch_own_time(self, engine: TrainEngine) -> None:
        """Begin to measure the time that this rank computes in `engine` without waiting for others."""
        if isinstance(engine, HasOwnBlocks):
            self.own_time.watch(engine.own_blocks())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_own_time(self) -> Owns:
        """The measured time by phase, since the last call. Not a collective."""
        return self.own_time.take()

    def _limit_collectives(self) -> None:
        """Also those of groups that an engine made; whoever builds one calls this."""
        if self._doors is not None:
            limit_collectives(self._timeout)

    @property
    def actor(self) -> TrainEngine:
        """The policy's engine. Raises RuntimeError in a group without one, and before `init_model`."""
        return _present(self._actor, "actor")

    @property
    def ref(self) -> TrainEngine:
        return _present(self._ref, "reference policy")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @record_function("compute_log_prob")
    @memory_watch().during("log_prob")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys`, float32 [B, R], at `meta_info['temperature']` or the rollout's.

        With router replay also `ROUTES`, unless `data` has them.
        """
        with self.own_time.during("old_log_prob"):
            log_probs, entropies = self.actor.compute_log_prob(
                data,
                temperature=self._temperature(data),
                limits=_log_prob_limits(self.config.rollout),
                calculate_entropy=True,
            )
        tensors = {"old_log_probs": log_probs} | ({} if entropies is None else {"entropys": entropies})
        if isinstance(self.actor, RecordsRoutes) and (routes := self.actor.take_routes()) is not None:
            tensors[ROUTES] = routes
        return DataProto.from_dict(tensors=tensors)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @record_function("compute_ref_log_prob")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob`, float32 [B, R]."""
        with self.own_time.during("ref"):
            log_probs, _ = self.ref.compute_log_prob(
                data,
                temperature=self._temperature(data),
                limits=_log_prob_limits(self.config.ref),
            )
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    @record_function("update_actor")
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """One training step on the whole batch, of which `data` is this rank's chunk.

        Each optimizer step sees `ppo_mini_batch_size` prompts x `rollout.n` sequences, an equal part of them from every
        rank, in the order of the rank's chunk. Metrics are means over the optimizer steps, and equal on all ranks.
        """
        config = self.config.actor
        if self._loss_fn is None:
            raise RuntimeError("this worker group has no actor")
        start_s = time.perf_counter()
        generator = shuffler(config.data_loader_seed, self.rank, data)
        mini_batches = iterate_mini_batches(data, config, size=self._mini_batch_size, generator=generator)
        with memory_watch().during("update_actor"), self.own_time.during("update_actor"):
            steps = [
                self.actor.train_mini_batch(
                    mini_batch,
                    self._loss_fn,
                    temperature=self._temperature(data),
                    limits=MicroBatchLimits.choose(
                        dynamic=config.use_dynamic_bsz,
                        max_tokens=config.ppo_max_token_len_per_gpu,
                        max_sequences=config.ppo_micro_batch_size_per_gpu,
                    ),
                    calculate_entropy=config.calculate_entropy or config.entropy_coeff != 0.0,
                )
                for mini_batch in self.counted(mini_batches, num_mini_batches(len(data), config, self._mini_batch_size))
            ]
        metrics = {_actor_metric(name): sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        metrics["actor/skipped_steps"] = sum(step["skipped_steps"] for step in steps)
        metrics["actor/lr"] = self.actor.step_lr()
        if config.use_kl_loss:
            metrics["actor/kl_coef"] = config.kl_loss_coef
        return metrics | self._costs.flops(data, time.perf_counter() - start_s) | self._costs.memory()

    def counted(self, mini_batches: Iterable[DataProto], total: int) -> Iterator[DataProto]:
        """Iterate over the mini-batches, and count them for `progress`."""
        try:
            for done, mini_batch in enumerate(mini_batches):
                self._progress = Progress(done, total, "mini-batches")
                yield mini_batch
        finally:
            self._progress = None

    async def progress(self) -> Progress | None:
        """The progress of this rank's active update; None without one. It answers during the update."""
        return self._progress

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, tool: str) -> None:
        """Trace this rank from here to `stop_profile`, if `actor.profiler` has chosen it. No collective."""
        if self.config.actor.profiler.traces(self.rank):
            self._profiler.start(tool)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self, directory: str, step: int) -> None:
        """Write the trace to `step_<step>_rank_<rank>.<...>` in `directory` of this rank's host. No collective."""
        self._profiler.stop(Path(directory) / f"step_{step}_rank_{self.rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Write `actor.checkpoint.save_contents` to the directory `path`, which all ranks share.

        With `async_save` it may return earlier: `checkpoint_written` waits for the end.
        """
        self.save(self.actor, Path(path), self.config.actor.checkpoint)

    def save(self, engine: TrainEngine, directory: Path, checkpoint: CheckpointConfig) -> None:
        """Save, or begin to save, the state to `path`. A collective."""
        if self._background is None or not checkpoint.async_save:
            engine.save_checkpoint(directory, checkpoint.save_contents)
        elif isinstance(engine, SavesInBackground):
            engine.begin_checkpoint(directory, checkpoint.save_contents, self._background.write)
        else:
            logger.warning("checkpoint.async_save: %s has no `begin_checkpoint`: it waits", type(engine).__name__)
            engine.save_checkpoint(directory, checkpoint.save_contents)

    @property
    def checkpoints_saved_async(self) -> bool:
        """Whether any engine saves its checkpoints asynchronously."""
        return self._has_actor and self.config.actor.checkpoint.async_save

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def checkpoint_written(self) -> Written:
        """Wait until all checkpoints are on disk. Raises the error of a write."""
        return Written() if self._background is None else await self._background.written()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Load `actor.checkpoint.load_contents` from `path`, with any number of ranks. The reference stays as it is."""
        self.before_step()
        self.actor.load_checkpoint(Path(path), self.config.actor.checkpoint.load_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str, dtype: str | None = None) -> None:
        """Write a Hugging Face directory; `dtype` as in `fsdp_config`, by default that of the sharded parameters."""
        self.actor.export_hf(Path(path), dtype)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_wide(self, names: Sequence[str]) -> None:
        """Send these tensors in their own dtype, because engines keep them in float32. Called before the first sync."""
        self._kept_wide = frozenset(names)

    def before_step(self) -> None:
        """Engines call it before they change values of `snapshot` or the weight source."""
        self.await_copied()
        self._memory.await_copied()
        if self._background is not None:
            self._background.await_copied()

    def snapshot(self) -> dict[str, torch.Tensor]:
        state = {f"{RNG}{name}": value for name, value in rng_state(self.device_name).items()}
        return state | {f"actor.{name}": value for name, value in _rememberable(self.actor).snapshot().items()}

    def restore(self, saved: State) -> None:
        _rememberable(self.actor).restore(under("actor.", saved))
        if rng := under(RNG, saved):
            set_rng_state(self.device_name, {name: value.clone() for name, value in rng.items()})

    def places(self) -> Places | None:
        return placed_under("actor.", self.actor.places()) if isinstance(self.actor, Reshardable) else None

    @property
    def is_rememberable(self) -> bool:
        return isinstance(self._actor, Rememberable)

    def seed_anew(self, step: int) -> None:
        seed_everything(self._seed + self.rank + step)

    def weight_source(self) -> WeightSource:
        return self.actor.weight_source(self.config.rollout.dtype, kept_wide=self._kept_wide)

    def close(self) -> None:
        if self._doors is not None:
            dist.destroy_process_group()
            self._doors.close()

    def _temperature(self, data: DataProto) -> float:
        return float(data.meta_info.get("temperature", self.config.rollout.temperature))


def _log_prob_limits(config: RolloutConfig | RefConfig) -> MicroBatchLimits:
    return MicroBatchLimits.choose(
        dynamic=config.log_prob_use_dynamic_bsz,
        max_tokens=config.log_prob_max_token_len_per_gpu,
        max_sequences=config.log_prob_micro_batch_size_per_gpu,
    )


def _rememberable(engine: TrainEngine) -> Rememberable:
    assert isinstance(engine, Rememberable)  # `is_rememberable` has said so
    return engine


def _actor_metric(name: str) -> str:
    """Losses name their metrics in full; what the engine adds has no prefix."""
    return name if "/" in name else f"actor/{name}"


def _present(engine: TrainEngine | None, what: str) -> TrainEngine:
    if engine is None:
        raise RuntimeError(f"this worker group has no {what}, or init_model has not been called")
    return engine
