"""The trainer ranks of one run: one Ray process each, started and restarted together."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl.checkpoint_engine.memory.publishing import publisher_environment
from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.errors import PlacementError, WorkerDied, WorkerGroupError
from verl.trainer.checkpoints import CheckpointDirectory
from verl.trainer.fleet.machines import ray_nodes
from verl.trainer.fleet.memory_checkpoint import MemoryCheckpoint
from verl.trainer.fleet.placement import refuse_missing_files
from verl.trainer.fleet.recovery import RestartLimit
from verl.utils.timing import marked_timer
from verl.workers.config import CriticConfig, PPOConfig
from verl.workers.critic import ActorCriticWorker
from verl.workers.fsdp_workers import ActorRolloutRefWorker

logger = logging.getLogger(__name__)

ACCELERATOR_RESOURCE = {"cpu": None, "cuda": "GPU", "npu": "NPU"}
FEWER_PLACED_WITHIN_S = 10.0
"""Seconds to place fewer ranks, when the devices have already come free."""
PLACED_WITHIN_S = 60.0
"""Seconds to place the first ranks, whose devices were free when the run was checked."""
FREED_WITHIN_S = 5.0
"""Seconds until the devices of ended ranks are free again on a live machine."""
ANSWERS_WITHIN_S = 10.0
"""Ranks answer while they compute. After a failure, one that does not answer within this time is restarted."""


NOTICED, ENDED, RESOURCES, PROCESSES = "noticed", "ended", "resources", "processes"
MODELS, STATE = "models", "state"
PARTS = NOTICED, ENDED, RESOURCES, PROCESSES, MODELS, STATE
"""Parts of a restart: find the lost ranks; end the others; find room for new ranks; wait for their answer; build their
models; restore their state."""


@dataclass(frozen=True)
class Loss:
    """The loss of trainer ranks that new ones have replaced."""

    what: str
    """The ranks that died, as text."""
    remembered: int | None
    """The step whose state the new ranks have from memory; None: they have their initial state."""
    began_s: float
    """When the failed work was noticed, by `time.monotonic`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each of its `PARTS`, summed over all attempts."""

    def __str__(self) -> str:
        """The duration so far, and that of each part."""
        parts = ", ".join(f"{part} {self.seconds.get(part, 0.0):.1f}" for part in PARTS)
        return f"{time.monotonic() - self.began_s:.1f} s ({parts})"

    def metrics(self) -> dict[str, float]:
        """Metrics for the first step that ends after the loss."""
        parts = {f"recovery/{part}_s": self.seconds.get(part, 0.0) for part in PARTS}
        return parts | {"recovery/step_s": time.monotonic() - self.began_s}


class TrainerRanks:
    """Starts, restarts and ends the trainer ranks. Lives on the driver, used by its main thread."""

    def __init__(
        self,
        config: PPOConfig,
        *,
        device: str,
        model_path: Path,
        with_reference: bool,
        critic: CriticConfig | None,
        loop: LoopThread,
        limit: RestartLimit,
        fewer: Sequence[tuple[int, int]] = (),
        placed: Callable[[list[str]], None] | None = None,
    ) -> None:
        """`fewer` has smaller numbers of hosts and ranks on each with which training may go on, the largest first.
        `placed` is called with the Ray nodes of the ranks, before their processes start.

        Starts the processes; call `build` next. Raises what `RayWorkerGroup` raises, and ConfigError for files that the
        driver has and another host lacks."""
        self._config, self._device, self._critic = config, device, critic
        self._model_path = model_path
        self._with_reference = with_reference
        self._kept_wide: list[str] = []
        self._limit = limit
        self._layout = config.trainer.nnodes, config.trainer.n_gpus_per_node
        self._fewer = list(fewer)
        self.memory = MemoryCheckpoint(lambda: self.group, loop, enabled=config.trainer.memory_checkpoint == "auto")
        self.restarts = 0
        """How often they were started again."""
        self.loss: Loss | None = None
        """The last one."""
        ranks = config.trainer.world_size
        logger.info("starting %d trainer rank%s on %s", ranks, "s" * (ranks > 1), device)
        self.group = self._start({}, placed=placed)
        try:
            if config.trainer.nnodes > 1:
                self._require_shared_files()
        except BaseException:
            self.close(grace_s=0.0)
            raise

    @property
    def nodes(self) -> list[str]:
        """The Ray nodes of the trainer ranks, in the order of ranks."""
        processes = self.group.processes
        return list(dict.fromkeys(processes[rank].node_id for rank in sorted(processes)))

    def build(self) -> None:
        """Have the ranks build the models with the weights in their directories."""
        self.group.init_model()
        if self._critic is not None:
            self.group.init_critic()

    def keep_wide(self, names: list[str]) -> None:
        """See `ActorRolloutRefWorker.keep_wide`."""
        self._kept_wide = names
        self.group.keep_wide(names)

    def restart_lost(self) -> int:
        """If any rank died or does not answer, restart all ranks and return their number. `loss` has the details.

        Returns 0 if none did, or if they cannot or may not be restarted: the run then ends with the original failure.
        """
        began_s = time.monotonic()
        seconds: dict[str, float] = {}
        with marked_timer(NOTICED, seconds):
            lost = self.group.lost(ANSWERS_WITHIN_S)
        if not lost:
            return 0
        what = f"trainer {'; '.join(lost)}"
        alive = ray_nodes()
        before = [node if node in alive else None for node in self.nodes]
        while self._limit.take():
            with marked_timer(ENDED, seconds):
                self.group.shutdown(grace_s=0.0)
                self.memory.end_copying()
            try:
                self.group = self._start_again(seconds, before)
                with marked_timer(MODELS, seconds):
                    self.build()
                    self.group.keep_wide(self._kept_wide)
                with marked_timer(STATE, seconds):
                    remembered = self.memory.restore()
            except WorkerDied as exc:  # once more, if that may be
                logger.warning("%s; started again, they died again: %s", what, _first_line(exc))
                before = []
                continue
            except WorkerGroupError as exc:
                logger.error("%s, and cannot be started again: %s", what, _first_line(exc))  # noqa: TRY400
                return 0
            self.restarts += 1
            self.loss = Loss(what, remembered, began_s, seconds)
            return self.group.world_size
        logger.error("%s; %s allows no other start", what, self._limit)
        return 0

    def close(self, grace_s: float) -> None:
        self.memory.close()
        self.group.shutdown(grace_s=grace_s)

    def _start_again(self, seconds: dict[str, float], nodes: Sequence[str | None]) -> RayWorkerGroup:
        """As many ranks as before, or if there is no room for them, as many as there is room for and may be.

        On these `nodes`, if they have room: rollouts are on others, and the state in memory is there.
        """
        if any(nodes):
            with suppress(PlacementError):
                return self._start(seconds, wait_s=FREED_WITHIN_S, nodes=nodes)
        try:
            return self._start(seconds, wait_s=self._config.trainer.restart_wait_s)
        except PlacementError as exc:
            shortage = exc
        layout = self._layout
        for nnodes, each in self._fewer:
            if nnodes * each >= layout[0] * layout[1]:
                continue
            self._layout = nnodes, each
            try:
                group = self._start(seconds, wait_s=FEWER_PLACED_WITHIN_S)
            except PlacementError:
                continue
            logger.warning(
                "%d of %d trainer ranks go on (trainer.min_ranks=%d): %s",
                group.world_size,
                self._config.trainer.world_size,
                self._config.trainer.min_ranks,
                _first_line(shortage),
            )
            return group
        self._layout = layout
        raise shortage

    def _start(
        self,
        seconds: dict[str, float],
        wait_s: float = PLACED_WITHIN_S,
        nodes: Sequence[str | None] = (),
        placed: Callable[[list[str]], None] | None = None,
    ) -> RayWorkerGroup:
        """`seconds` gets what its parts took; `nodes` is that of `RayResourcePool`."""
        config, trainer = self._config, self._config.trainer
        nnodes, each = self._layout
        pool = RayResourcePool(
            process_on_nodes=[each] * nnodes,
            num_cpus_per_process=trainer.num_cpus_per_rank,
            distinct_nodes=True,
            nodes=nodes,
            use_accelerator=ACCELERATOR_RESOURCE[self._device],
            name_prefix="trainer",
            placement_timeout_s=wait_s,
        )
        policy = replace(config.actor_rollout_ref, model=config.actor_rollout_ref.model.at(self._model_path))
        worker = RayClassWithInitArgs(
            ActorRolloutRefWorker if self._critic is None else ActorCriticWorker,
            config=policy,
            role="actor_ref" if self._with_reference else "actor",
            device=self._device,
            seed=trainer.seed,
            correction=config.algorithm.rollout_correction if policy.actor.use_rollout_log_probs else None,
            distillation=config.distillation.distillation_loss if config.distillation.enabled else None,
            **({} if self._critic is None else {"critic": self._critic}),
        )
        with marked_timer(RESOURCES, seconds):
            pool.place()
        if placed is not None:
            placed(pool.placed_on)
        with marked_timer(PROCESSES, seconds):
            return RayWorkerGroup(
                resource_pool=pool,
                ray_cls_with_init=worker,
                name_prefix="trainer",
                env_vars={**thread_limits(), **publisher_environment(), "VERL_FILES_FOR": trainer.files_for},
                nsight=config.global_profiler.nsight(config.profile_directory),
                silence_s=policy.nccl_timeout,
            )

    def _require_shared_files(self) -> None:
        """Raises ConfigError naming what of the driver's files other hosts of the trainer do not see."""
        root = Path(self._config.trainer.output_dir).absolute()
        critic_path = self._critic.model.path if self._critic else None
        with tempfile.NamedTemporaryFile(dir=root, prefix=".shared-") as token:
            keys = {str(self._model_path): f"actor_rollout_ref.model.path={self._model_path}"}
            if critic_path is not None:
                keys[critic_path] = f"critic.model.path={critic_path}"
            if self._config.trainer.save_freq > 0:
                keys[token.name] = f"trainer.default_local_dir={root} (for checkpoints)"
            if resume_from := CheckpointDirectory(self._config.trainer).find():
                keys[str(resume_from)] = f"the checkpoint {resume_from}"
            missing = self.group.missing_files(list(keys))
        processes = self.group.processes
        refuse_missing_files(
            keys, {f"{processes[rank].address} (trainer rank {rank})": paths for rank, paths in enumerate(missing)}
        )


def thread_limits() -> dict[str, str]:
    """One thread per trainer rank: ranks are the parallelism; more threads than cores get in each other's way."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0]
