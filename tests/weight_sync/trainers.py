"""Trainers of tiny models, each with a rollout node and the manager that joins them.

They count versions on their own, so that tests may share them in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint_engine.fakes import RowShardedSource, Through
from tests.weight_sync.workers import PlainTrainer, WatchedWorker
from tests.workers.engine.engine_cases import batch
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank
from verl.protocol import DataProto
from verl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import from_mapping
from verl.workers.config import ActorRolloutRefConfig
from verl.workers.weight_sync.node import start_node
from verl.workers.weight_sync.ray_ports import RayRolloutNode, RayTrainerRank

NUM_RANKS = 2
CONFIG = CheckpointEngineConfig.from_mapping(
    {"retries": 0, "block_kilobytes": 256, "deadlines": {"publish_s": 120, "activate_s": 300}}
)


class Trainer(ABC):
    manager: CheckpointEngineManager
    version = 0

    @abstractmethod
    def train(self) -> None:
        """Change every tensor."""

    async def sync(self) -> SyncReport:
        self.version += 1
        return await self.manager.update_weights(self.version)

    async def train_and_sync(self) -> SyncReport:
        self.train()
        return await self.sync()

    async def close(self) -> None:
        await self.manager.close()


class LocalTrainer(Trainer):
    """A Hugging Face model in this process, whose rows two ranks share; every port can break."""

    def __init__(self, path: Path, dtype: str, shm_dir: Path, config: CheckpointEngineConfig = CONFIG) -> None:
        shm_dir.mkdir()
        self.shm_dir = shm_dir
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._dtype = dtype
        self._noise = torch.Generator().manual_seed(1)
        live = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.source = RowShardedSource(live, 0, NUM_RANKS, dtype)
        self.ranks = [
            Through(TrainerRank(rank, RowShardedSource(live, rank, NUM_RANKS, dtype), config))
            for rank in range(NUM_RANKS)
        ]
        self.node = Through(RolloutNode(0, config, job=path.name, shm_dir=shm_dir))
        self.manager = CheckpointEngineManager(config=config, trainers=self.ranks, nodes=[self.node])

    @torch.no_grad()
    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=self._noise), alpha=0.05)

    def weights(self) -> dict[str, torch.Tensor]:
        """The present weights, whole, by Hugging Face name and cast to the rollout dtype. Tied ones once."""
        dtype = getattr(torch, self._dtype)
        return {name: parameter.detach().to(dtype, copy=True) for name, parameter in self.model.named_parameters()}


class FSDPTrainer(Trainer):
    """Actor workers of the project on Ray, over gloo, whatever their engine; a rollout node in its own process."""

    def __init__(
        self,
        path: Path,
        strategy: str,
        dtype: str,
        shm_dir: Path,
        scratch: Path,
        model: Mapping[str, Any] | None = None,
        num_ranks: int = NUM_RANKS,
        **actor: dict[str, Any],
    ) -> None:
        """`model` is of the model's configuration, `actor` are sections of the actor's."""
        shm_dir.mkdir()
        self._dtype, self.scratch = dtype, scratch
        config = from_mapping(
            ActorRolloutRefConfig,
            {
                "model": {"path": str(path), **(model or {})},
                "actor": {
                    "strategy": strategy,
                    "ppo_mini_batch_size": 8,
                    "optim": {"lr": 1e-2},
                    "fsdp_config": {"dtype": "float32"},
                    **actor,
                },
                "rollout": {"n": 2, "dtype": dtype},
            },
        )
        self.group = RayWorkerGroup(
            resource_pool=RayResourcePool([num_ranks], num_cpus_per_process=0.4),
            ray_cls_with_init=RayClassWithInitArgs(WatchedWorker, config, "actor", device="cpu"),
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        self.group.init_model()
        self.manager = manager_on_ray(self.group, shm_dir, path.name, CONFIG)

    def train(self) -> None:
        """One optimizer step."""
        data = batch(16, seed=self.version)
        before = self.group.compute_log_prob(data)
        self.group.update_actor(DataProto.from_dict(tensors=dict(data.union(before).batch.items())))

    def weights(self) -> dict[str, torch.Tensor]:
        """The same, gathered and written by the export, which shares nothing with the sync but the names of experts."""
        self.group.export_hf(str(self.scratch), "float32")
        dtype = getattr(torch, self._dtype)
        return {
            name: tensor.to(dtype)
            for file in sorted(self.scratch.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }

    async def close(self) -> None:
        await super().close()
        self.group.shutdown()


class PlainTrainerOnRay(Trainer):
    """Ranks that start quickly, to be killed, behind the project's own Ray adapters."""

    def __init__(self, path: Path, shm_dir: Path, config: CheckpointEngineConfig) -> None:
        self._shm_dir, self._config = shm_dir, config
        self.group = RayWorkerGroup(
            resource_pool=RayResourcePool([NUM_RANKS], num_cpus_per_process=0.1),
            ray_cls_with_init=RayClassWithInitArgs(PlainTrainer, str(path)),
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        self.start_sync()

    def start_sync(self) -> None:
        """A node and a manager; also after the former ones were lost."""
        self.manager = manager_on_ray(self.group, self._shm_dir, "job", self._config)

    def train(self) -> None:
        self.group.train(self.version)

    async def close(self) -> None:
        await super().close()
        self.group.shutdown()


def manager_on_ray(
    group: RayWorkerGroup, shm_dir: Path, job: str, config: CheckpointEngineConfig
) -> CheckpointEngineManager:
    return CheckpointEngineManager(
        config=config,
        trainers=[RayTrainerRank(rank, worker, config) for rank, worker in enumerate(group.workers)],
        nodes=[RayRolloutNode(0, lambda: start_node(0, config, job=job, shm_dir=shm_dir, options={}))],
    )
