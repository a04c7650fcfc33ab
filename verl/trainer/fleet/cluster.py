"""The Ray processes of one run, started together and ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ray.actor import ActorHandle

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.plan.topology import best_of
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.checkpoint_engine.support.memory import MemoryUse
from verl.checkpoint_engine.support.signals import uninterrupted
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.single_controller import RayWorkerGroup
from verl.trainer.fleet.lost_machines import LostMachines
from verl.trainer.fleet.machines import addresses_of, machines, ray_nodes
from verl.trainer.fleet.nodes import RolloutNodes
from verl.trainer.fleet.placement import Machine, place_rollouts, require_machines
from verl.trainer.fleet.recovery import MACHINES, NODES, REPLICAS, TRAINER_RANKS, Recovery, RestartLimit
from verl.trainer.fleet.replicas import ReplicaPool, make_replica
from verl.trainer.fleet.reward_models import RewardModels
from verl.trainer.fleet.session import RaySession
from verl.trainer.fleet.starting import Starting
from verl.trainer.fleet.syncs import Syncs
from verl.trainer.fleet.teachers import Teachers
from verl.trainer.fleet.trainer_ranks import ACCELERATOR_RESOURCE, TrainerRanks, thread_limits
from verl.utils.config import ConfigError
from verl.utils.timing import Span
from verl.workers.config import CriticConfig, PPOConfig
from verl.workers.rollout import Placement, RolloutMode, RolloutReplica, launch_all
from verl.workers.rollout.errors import RolloutError
from verl.workers.weight_sync.ray_ports import RayTrainerRank

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Cluster:
    """Trainer ranks, rollout nodes and replicas of one run, and the manager that syncs them.

    Lives on the driver. A context manager: leaving it ends every process, and Ray if the cluster started it.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        model_path: Path,
        device: str,
        replicas: Sequence[RolloutReplica],
        arena_nbytes: int,
        with_reference: bool,
        critic: CriticConfig | None = None,
        reward_models: RewardModels | None = None,
        teachers: Teachers | None = None,
        on_sync: Sequence[Callable[[SyncReport], None]] = (),
        fewer_ranks: Sequence[tuple[int, int]] = (),
        starting: Starting,
    ) -> None:
        """Starts all processes; ends them again if that fails. Call `connect` next. `model_path` is a local directory.

        `replicas` come from `make_replicas`, not started; `arena_nbytes` is the size of every rollout node's arena.
        `critic` and `fewer_ranks` go to `TrainerRanks`. Each of `on_sync` gets the report of every sync, `starting` the
        seconds of each part. Raises ConfigError or BackendUnavailable for a rollout node whose machine does not fit.
        """
        self._config = config
        self._device = device
        self.starting = starting
        self.loop = LoopThread("cluster")
        self._ray = RaySession(timeline=config.ray_kwargs.timeline_json_file)
        self._trainer: TrainerRanks | None = None
        self._nodes: RolloutNodes | None = None
        self._reward_models = reward_models
        self.teachers = teachers
        self._on_sync = on_sync
        self.manager: CheckpointEngineManager | None = None
        self._launching: Future[None] | None = None
        """The start of the engines."""
        self.restart_limit = RestartLimit(config.trainer.max_restarts, config.trainer.restart_window_s)
        """Of trainer ranks, and of what else a loop runs."""
        self.recovery = Recovery(
            max_restarts=config.actor_rollout_ref.rollout.max_restarts, around=self._ray.needing_gcs
        )
        self.recovery.watch(MACHINES, lambda: self.run(self._lost_machines.leave()))
        self.recovery.watch(NODES, lambda: self.run(self.nodes.restart_lost()))
        self.recovery.watch(REPLICAS, lambda: self.run(self._pool.heal()))
        self.recovery.watch(TRAINER_RANKS, self._restart_trainer)
        self.syncs = Syncs(self.loop, lambda: self._manager, self.recovery)
        self._pool = ReplicaPool(
            replicas,
            make=lambda rank: make_replica(config, rank, model_path=model_path, device=device),
            launch=self._launch,
            manager=lambda: self._manager,
        )
        self._lost_machines = LostMachines(
            config,
            device,
            machines=self._machines,
            trainer_nodes=lambda: self.trainer_ranks.nodes,
            nodes=lambda: self.nodes,
            pool=self._pool,
            manager=lambda: self._manager,
        )
        try:
            with starting.during("Ray"):
                self._ray.start(config.ray_kwargs.ray_init, starting.warm)
            require_machines(config, device, [*self._machines().values()])
            with starting.during("trainer ranks"):
                self._trainer = TrainerRanks(
                    config,
                    device=device,
                    model_path=model_path,
                    with_reference=with_reference,
                    critic=critic,
                    loop=self.loop,
                    limit=self.restart_limit,
                    fewer=fewer_ranks,
                    placed=self._begin_rollouts,
                )
            node_machines = dict(enumerate(self._placement.nodes))
            engine_config = self._with_topology(config.checkpoint_engine, node_machines)
            self._start_nodes(engine_config, node_machines)  # while the trainer ranks build their model
            if teachers is not None:
                teachers.begin_start()
            with starting.during("models"):
                self._trainer.build()
            if teachers is not None:
                with starting.during("teachers"):
                    teachers.await_started()
            if reward_models is not None:  # which sleep when the rollout engines take their memory
                with starting.during("reward models"):
                    reward_models.start(self.trainer_ranks.nodes)
            with starting.during("rollout nodes"):
                self.run(self.nodes.check(arena_nbytes))
            self._engine_config = engine_config
        except BaseException as exc:
            self._ray.add_note(exc)
            self.close(in_order=False)
            if self._ray.lost is not None:
                raise self._ray.lost from None
            raise

    def connect(self) -> None:
        """Wait until the engines run, and make the manager that syncs them. Raises what an engine's start raises."""
        with self.starting.during("engines"):
            self._launching = self._launching or self.loop.start(self._launch_rollouts())
            self._launching.result()
        self.trainer_ranks.keep_wide(sorted({name for replica in self.replicas for name in replica.kept_wide}))
        self._join(self._engine_config)

    @property
    def actor(self) -> RayWorkerGroup:
        """The worker group of the trainer ranks."""
        return self.trainer_ranks.group

    @property
    def trainer_ranks(self) -> TrainerRanks:
        assert self._trainer is not None  # __init__ makes them
        return self._trainer

    @property
    def nodes(self) -> RolloutNodes:
        assert self._nodes is not None  # __init__ makes them
        return self._nodes

    @property
    def replicas(self) -> list[RolloutReplica]:
        return self._pool.replicas

    @property
    def restarts(self) -> int:
        """The number of replicas restarted after they died or left service."""
        return self._pool.restarts

    @property
    def is_serving(self) -> bool:
        """Whether any engine is in service."""
        return bool(self._manager.replicas)

    @property
    def server_handles(self) -> list[ActorHandle[Any]]:
        """Servers of the replicas in service; before `connect`, of all. Raises what an engine's start has raised."""
        if self.manager is None:
            try:
                return [replica.server_handle for replica in self.replicas]
            except RolloutError:
                if self._launching is not None:
                    self._launching.result()
                raise
        in_service = {replica.name for replica in self._manager.replicas}
        return [replica.server_handle for replica in self.replicas if replica.name in in_service]

    def rejoin(self, config: CheckpointEngineConfig) -> None:
        """Continue with another backend: starts new rollout nodes, keeps trainer ranks and engines.

        The engines keep their weights until the next `update_weights`.
        """
        self.run(self._manager.close())
        self.nodes.kill()
        node_machines = self.nodes.machines
        engine_config = self._with_topology(config, node_machines)
        self._start_nodes(engine_config, node_machines)
        self._join(engine_config)

    def free_rollout_memory(self) -> None:
        """Have engines that can sleep free weights and KV cache for the trainer; `update_weights` wakes them."""
        if any(replica.can_sleep for replica in self.replicas):
            self.run(self._manager.sleep_replicas())

    def _restart_trainer(self) -> int:
        """Start trainer ranks again if any is lost; the next sync connects them."""
        restarted = self.trainer_ranks.restart_lost()
        if restarted:
            self.run(self._manager.replace_trainers(self._trainer_ports(self._engine_config)))
        return restarted

    def resize(self, count: int) -> None:
        """Start changing the number of replicas to `count`, at least 1, during the run.

        `replicas` and `server_handles` include an added replica once it has the version in service. They exclude a
        removed one at once; it ends when its requests have ended. A replica that cannot be started is
        logged. Raises ConfigError where replicas share the trainer's accelerators.
        """
        if self._config.trainer.placement == "colocated" and self._device != "cpu":
            raise ConfigError("rollout replicas on the trainer's accelerators cannot become more or fewer during a run")
        self.run(self._pool.resize(count, self.nodes.machines))

    def profile_rollouts(self, prefix: str | None) -> None:
        """Have all engines begin traces whose names begin with `prefix`, or end them."""

        async def tell() -> None:
            await asyncio.gather(*(replica.profile(prefix) for replica in self.replicas))

        self.run(tell())

    def begin_take_spans(self) -> Future[list[Span]]:
        """Request the rollout engines' spans since the last call; omits engines that do not answer.

        Does not wait for the answers: an engine may be busy.
        """

        async def take() -> list[Span]:
            answers = await asyncio.gather(*(replica.take_spans() for replica in self.replicas), return_exceptions=True)
            return [span for spans in answers if not isinstance(spans, BaseException) for span in spans]

        return self.loop.start(take())

    def begin_measure_engines(self) -> Future[list[MemoryUse]]:
        """Request the rollout engines' memory use, as `begin_take_spans` does."""

        async def measure() -> list[MemoryUse]:
            answers = await asyncio.gather(*(replica.memory() for replica in self.replicas), return_exceptions=True)
            return [use for use in answers if not isinstance(use, BaseException)]

        return self.loop.start(measure())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the cluster's event loop, and wait for its result."""
        return self.loop.run(work)

    def close(self, *, in_order: bool = True) -> None:
        """End every process; Ctrl-C waits until that is done. Idempotent.

        With `in_order`, members finish and close their resources. Otherwise they are killed, which also works if some
        hang or are dead; their shared memory and engine processes end with them.
        """
        in_order &= self._ray.is_whole
        with uninterrupted():
            if in_order and self.manager is not None:
                self.run(self.manager.close())
                self.run(self._pool.shutdown())
            if in_order or not self._ray.owned:
                self._kill_all(grace_s=5.0 if in_order else 0.0)
            self.loop.close()
            self.manager, self._trainer, self._nodes = None, None, None
            self._ray.close()

    def _kill_all(self, grace_s: float) -> None:
        """One by one: needs a Ray that works. A Ray of ours is ended instead when it may not work any more."""
        if self._reward_models is not None:
            self._reward_models.close()
        if self.teachers is not None:
            self.teachers.close()
        for replica in self._pool.everyone:
            replica.kill()
        if self._trainer is not None:
            self._trainer.close(grace_s)
        if self._nodes is not None:
            self._nodes.kill()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._ray.add_note(error)
        self.close(in_order=error is None)
        if error is not None and self._ray.lost is not None:
            raise self._ray.lost from None

    @property
    def _manager(self) -> CheckpointEngineManager:
        assert self.manager is not None  # __init__ makes it
        return self.manager

    def _begin_rollouts(self, trainer_nodes: list[str]) -> None:
        """Start the engines while the trainer ranks start, where engines share no device with anybody.

        Elsewhere only their processes, which import meanwhile: an engine measures the memory that others leave.
        """
        rollout, count = self._config.actor_rollout_ref.rollout, len(self.replicas)
        self._placement = place_rollouts(
            self._config, self._device, replicas=count, trainer_nodes=trainer_nodes, all_nodes=list(ray_nodes())
        )
        hint = self.replicas[0].startup_hints.get(self.replicas[0].device, "")
        logger.info("starting %d %s rollout engine%s%s", count, rollout.name, "s" * (count > 1), hint)
        for replica, place in zip(self.replicas, self._placement.replicas, strict=True):
            replica.begin_server(self._rollout_mode, place)
        if self._device == "cpu" or self._rollout_mode is RolloutMode.STANDALONE:
            self._launching = self.loop.start(self._launch_rollouts())

    async def _launch_rollouts(self) -> None:
        places = zip(self.replicas, self._placement.replicas, strict=True)
        await launch_all(*(self._launch(replica, place) for replica, place in places))

    @property
    def _rollout_mode(self) -> RolloutMode:
        separate = self._config.trainer.placement == "separate"
        return RolloutMode.STANDALONE if separate else RolloutMode.HYBRID

    async def _launch(self, replica: RolloutReplica, place: Placement) -> None:
        if self._rollout_mode is RolloutMode.STANDALONE:
            await replica.init_standalone(place)
        else:
            await replica.init_hybrid(place)

    def _with_topology(
        self, config: CheckpointEngineConfig, node_machines: Mapping[int, str]
    ) -> CheckpointEngineConfig:
        """`config` with `topology=auto` replaced by the one for where everybody is."""
        topologies = resolve_backend(config).capabilities.topologies
        if config.topology != "auto":
            return config
        trainer_hosts = {process.address for process in self.actor.processes.values()}
        topology = best_of(topologies, trainer_hosts=trainer_hosts, node_hosts=[*addresses_of(node_machines).values()])
        if topology != topologies[0]:
            logger.info("weights go from rollout node to rollout node: checkpoint_engine.topology=%s", topology)
        return replace(config, topology=topology)

    def _machines(self) -> dict[str, Machine]:
        return machines(ACCELERATOR_RESOURCE[self._device])

    def _start_nodes(self, config: CheckpointEngineConfig, node_machines: Mapping[int, str]) -> None:
        self._nodes = RolloutNodes(
            config, machines=node_machines, hosts=addresses_of(node_machines), env_vars=thread_limits()
        )

    def _trainer_ports(self, config: CheckpointEngineConfig) -> list[RayTrainerRank]:
        return [
            RayTrainerRank(rank, worker, config)  # type: ignore[abstract] # see `remote`
            for rank, worker in enumerate(self.actor.workers)
        ]

    def _join(self, config: CheckpointEngineConfig) -> None:
        self._engine_config = config
        self.manager = CheckpointEngineManager(
            config=config,
            trainers=self._trainer_ports(config),
            nodes=self.nodes.ports,
            report_path=sync_report_path(self._config),
            on_report=self._on_sync,
        )
        self.run(self.manager.add_replicas(self.replicas))


def sync_report_path(config: PPOConfig) -> Path:
    """The file that gets the report of every sync."""
    return Path(config.checkpoint_engine.report_path or Path(config.trainer.output_dir) / "sync_reports.jsonl")
