"""The Ray processes of one hybrid run, started together and ended together."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl import envs
from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.manager import CheckpointEngineManager
from verl.checkpoint_engine.types import SyncReport
from verl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import HFModelConfig, PPOConfig, RolloutConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout import Placement, RolloutReplica, RolloutReplicaRegistry, launch_all
from verl.workers.weight_sync.node import start_node
from verl.workers.weight_sync.ray_ports import RayRolloutNode, RayTrainerRank

T = TypeVar("T")
logger = logging.getLogger(__name__)

ACCELERATOR_RESOURCE = {"cpu": None, "cuda": "GPU", "npu": "NPU"}


class Cluster:
    """Trainer ranks, rollout nodes and replicas of one run, and the manager that keeps them in step.

    Lives on the driver. A context manager: leaving it ends every process, and Ray if this started it.
    """

    def __init__(self, config: PPOConfig, *, model_path: Path, device: str, with_reference: bool) -> None:
        """Starts everything; nothing is left running if that fails. `model_path` is a local directory."""
        self._config = config
        self._device = device
        self._runner = asyncio.Runner()
        self._owns_ray = False
        self._actor: RayWorkerGroup | None = None
        self.replicas: list[RolloutReplica] = []
        self.manager: CheckpointEngineManager | None = None
        try:
            self._start_ray()
            self._start_trainer(model_path, with_reference)
            self._start_rollouts(model_path)
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def actor(self) -> RayWorkerGroup:
        """The trainer ranks."""
        assert self._actor is not None  # __init__ makes it
        return self._actor

    @property
    def server_handles(self) -> list[ActorHandle[Any]]:
        """Servers of the replicas in service."""
        in_service = {replica.name for replica in self._manager.replicas}
        return [replica.server_handle for replica in self.replicas if replica.name in in_service]

    def update_weights(self, version: int) -> SyncReport:
        """One transaction; then bring back what it quarantined, where that works. Raises SyncAborted."""
        report = self.run(self._manager.update_weights(version))
        if self._manager.quarantined:
            self.run(self._revive())
        return report

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the driver's event loop."""
        return self._runner.run(work)

    def close(self) -> None:
        """End every process. Idempotent; a member that is dead already does not keep the others from ending."""
        if self.manager is not None:
            self.run(self.manager.close())
            self.manager = None
        if self.replicas:
            self.run(_shut_down(self.replicas))
            self.replicas = []
        if self._actor is not None:
            self._actor.shutdown()
            self._actor = None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False
        self._runner.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _manager(self) -> CheckpointEngineManager:
        assert self.manager is not None  # __init__ makes it
        return self.manager

    def _start_ray(self) -> None:
        if ray.is_initialized():
            return
        arguments = dict(self._config.ray_kwargs.ray_init)
        # Two cores carry trainer ranks, engines and agent loops: what they reserve are fractions of logical CPUs.
        arguments.setdefault("include_dashboard", False)
        arguments.setdefault("logging_level", "warning")
        if "address" not in arguments:
            arguments["address"] = "local"
        ray.init(**arguments)
        self._owns_ray = True

    def _start_trainer(self, model_path: Path, with_reference: bool) -> None:
        config, trainer = self._config, self._config.trainer
        pool = RayResourcePool(
            process_on_nodes=[trainer.n_gpus_per_node] * trainer.nnodes,
            num_cpus_per_process=trainer.num_cpus_per_rank,
            use_accelerator=ACCELERATOR_RESOURCE[self._device],
            name_prefix="trainer",
        )
        policy = replace(config.actor_rollout_ref, model=_local(config.actor_rollout_ref.model, model_path))
        self._actor = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(
                ActorRolloutRefWorker,
                config=policy,
                role="actor_ref" if with_reference else "actor",
                device=self._device,
                checkpoint_engine=config.checkpoint_engine,
                seed=trainer.seed,
            ),
            name_prefix="trainer",
            env_vars=_thread_limits(),
        )
        self.actor.init_model()

    def _start_rollouts(self, model_path: Path) -> None:
        policy = self._config.actor_rollout_ref
        rollout = _resolved(self._config)
        replica_class = RolloutReplicaRegistry.get(rollout.name)
        count = self._num_replicas(rollout)
        model = _local(policy.model, model_path)
        self.replicas = [
            replica_class(replica_rank=index, config=rollout, model=model, device=self._device)
            for index in range(count)
        ]
        ranks = rollout.tensor_model_parallel_size
        placements = [
            Placement(
                node_index=0,
                local_index=index,
                local_count=count,
                device_ids=tuple(str(rank) for rank in range(index * ranks, (index + 1) * ranks))
                if self._device != "cpu"
                else (),
            )
            for index in range(count)
        ]
        launches = [
            replica.init_hybrid(placement) for replica, placement in zip(self.replicas, placements, strict=True)
        ]
        self.run(launch_all(*launches))

    def _num_replicas(self, rollout: RolloutConfig) -> int:
        if rollout.num_replicas is not None:
            return rollout.num_replicas
        return 1 if self._device == "cpu" else self._config.trainer.world_size // rollout.tensor_model_parallel_size

    def _join(self) -> None:
        config = self._config
        job = f"{os.getpid()}-{secrets.token_hex(4)}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        node = start_node(
            0,
            config.checkpoint_engine,
            job=job,
            shm_dir=envs.shm_dir(),
            options={"scheduling_strategy": here, "runtime_env": {"env_vars": _thread_limits()}},
        )
        output_dir = Path(config.trainer.output_dir)
        self.manager = CheckpointEngineManager(
            config=config.checkpoint_engine,
            trainers=[RayTrainerRank(rank, worker) for rank, worker in enumerate(self.actor.workers)],
            nodes=[RayRolloutNode(0, node)],
            report_path=Path(config.checkpoint_engine.report_path or output_dir / "sync_reports.jsonl"),
        )
        self.run(self.manager.add_replicas(self.replicas))

    async def _revive(self) -> None:
        """Restart quarantined replicas and have them load the current version from their node's arena."""
        broken = {replica.name for replica in self._manager.quarantined}
        for replica in self.replicas:
            if replica.name not in broken:
                continue
            try:
                await replica.launch_servers()
                await self._manager.add_replicas([replica])
                logger.warning("%s was restarted and is in service again", replica.name)
            except (CheckpointEngineError, ray.exceptions.RayError) as exc:
                logger.error("%s could not be restarted: %s", replica.name, exc)  # noqa: TRY400 - told in one line
        if not self._manager.replicas:
            raise CheckpointEngineError("no replica is in service and none could be restarted")


async def _shut_down(replicas: Sequence[RolloutReplica]) -> None:
    await asyncio.gather(*(replica.shutdown() for replica in replicas))


def _local(model: HFModelConfig, path: Path) -> HFModelConfig:
    return replace(model, path=str(path))


def _resolved(config: PPOConfig) -> RolloutConfig:
    """The rollout section with lengths taken over from the data section."""
    rollout = config.actor_rollout_ref.rollout
    return replace(
        rollout,
        prompt_length=rollout.prompt_length or config.data.max_prompt_length,
        response_length=rollout.response_length or config.data.max_response_length,
    )


def _thread_limits() -> dict[str, str]:
    """One thread per trainer rank: ranks are the parallelism; more threads than cores get in each other's way."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
