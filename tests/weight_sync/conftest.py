"""Four models on their way from a trainer to a real vLLM; engines take long to start and are shared by all tests."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoConfig, PretrainedConfig

from tests.weight_sync.replicas import InspectedVLLMReplica
from tests.weight_sync.trainers import FSDPTrainer, LocalTrainer
from verl.utils.builtin import make_tiny_model
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import RolloutReplica, RolloutReplicaRegistry, launch_all


@dataclass(frozen=True)
class Case:
    architecture: str
    tied: bool
    dtype: str
    ranks: int
    """Tensor-parallel ranks of the engine."""
    intermediate_size: int = 256


CASES = {
    "qwen2": Case("qwen2", tied=True, dtype="bfloat16", ranks=1),
    "qwen3": Case("qwen3", tied=False, dtype="bfloat16", ranks=2),
    "qwen3_moe": Case("qwen3_moe", tied=False, dtype="bfloat16", ranks=1, intermediate_size=144),
    "llama": Case("llama", tied=True, dtype="float32", ranks=1),
}


@dataclass(frozen=True)
class Line:
    """One model from the trainer to the engine."""

    trainer: LocalTrainer | FSDPTrainer
    replica: InspectedVLLMReplica
    config: PretrainedConfig


@contextmanager
def shared_memory() -> Iterator[Path]:
    """A directory of shared memory; nothing may be left in it in the end."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-weight-sync-"))
    try:
        yield directory
        assert list(directory.rglob("verl-*")) == []
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def shm_dir() -> Iterator[Path]:
    """What all trainers of the session share."""
    with shared_memory() as directory:
        yield directory


@pytest.fixture
def own_shm_dir() -> Iterator[Path]:
    """For one test that looks for what is left behind."""
    with shared_memory() as directory:
        yield directory


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Grouped-query attention, and a vocabulary that vLLM has to pad; so it has to the rows of experts, on CPU."""
    base = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(
            base / name,
            case.architecture,
            tie_word_embeddings=case.tied,
            hidden_size=128,
            intermediate_size=case.intermediate_size,
            heads=4,
            kv_heads=2,
        )
        for name, case in CASES.items()
    }


@pytest.fixture(scope="session")
def llama(model_paths: dict[str, Path], shm_dir: Path) -> Iterator[LocalTrainer]:
    trainer = LocalTrainer(model_paths["llama"], CASES["llama"].dtype, shm_dir / "llama")
    yield trainer
    asyncio.run(trainer.close())


@contextmanager
def fsdp_trainer(name: str, strategy: str, path: Path, shm_dir: Path, export: Path) -> Iterator[FSDPTrainer]:
    trainer = FSDPTrainer(path, strategy, CASES[name].dtype, shm_dir / name, export)
    yield trainer
    asyncio.run(trainer.close())


@pytest.fixture(scope="session")
def qwen2(
    ray_cluster: None, model_paths: dict[str, Path], shm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FSDPTrainer]:
    with fsdp_trainer("qwen2", "fsdp", model_paths["qwen2"], shm_dir, tmp_path_factory.mktemp("qwen2")) as trainer:
        yield trainer


@pytest.fixture(scope="session")
def qwen3(
    ray_cluster: None, model_paths: dict[str, Path], shm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FSDPTrainer]:
    with fsdp_trainer("qwen3", "fsdp2", model_paths["qwen3"], shm_dir, tmp_path_factory.mktemp("qwen3")) as trainer:
        yield trainer


@pytest.fixture(scope="session")
def qwen3_moe(
    ray_cluster: None, model_paths: dict[str, Path], shm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FSDPTrainer]:
    path, export = model_paths["qwen3_moe"], tmp_path_factory.mktemp("qwen3_moe")
    with fsdp_trainer("qwen3_moe", "fsdp2", path, shm_dir, export) as trainer:
        yield trainer


@pytest.fixture(scope="session")
def lines(
    ray_cluster: None,
    model_paths: dict[str, Path],
    qwen2: FSDPTrainer,
    qwen3: FSDPTrainer,
    qwen3_moe: FSDPTrainer,
    llama: LocalTrainer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Line]]:
    """Every case with its engine running, and in the service of the case's trainer. All start at the same time."""
    served = tmp_path_factory.mktemp("served")
    trainers: dict[str, LocalTrainer | FSDPTrainer] = {
        "qwen2": qwen2,
        "qwen3": qwen3,
        "qwen3_moe": qwen3_moe,
        "llama": llama,
    }
    made = {
        name: Line(
            trainer=trainers[name],
            replica=InspectedVLLMReplica(index, model_paths[name], served / name, dtype=case.dtype, ranks=case.ranks),
            config=AutoConfig.from_pretrained(model_paths[name]),
        )
        for index, (name, case) in enumerate(CASES.items())
    }

    async def start() -> None:
        await launch_all(*(line.replica.init_standalone() for line in made.values()))
        for line in made.values():
            await line.trainer.manager.add_replicas([line.replica])

    async def end() -> None:
        await asyncio.gather(*(line.replica.shutdown() for line in made.values()))

    try:
        asyncio.run(start())
        yield made
    finally:
        asyncio.run(end())


@pytest.fixture(scope="session")
def hf(ray_cluster: None, model_paths: dict[str, Path]) -> Iterator[RolloutReplica]:
    """A quick second engine for the weights of `llama`."""
    replica = RolloutReplicaRegistry.get("hf")(
        replica_rank=9,
        config=RolloutConfig(name="hf", dtype="float32", max_model_len=256, num_cpus=0.1, control_timeout_s=60),
        model=HFModelConfig(path=str(model_paths["llama"])),
    )
    asyncio.run(replica.init_standalone())
    yield replica
    asyncio.run(replica.shutdown())
