"""Models on their way from a trainer to a real vLLM. Engines take long to start and are shared by tests."""

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
from tests.weight_sync.trainers import NUM_RANKS, FSDPTrainer, LocalTrainer
from verl.utils.builtin import make_tiny_model
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import RolloutReplica, RolloutReplicaRegistry


@dataclass(frozen=True)
class Case:
    architecture: str
    strategy: str
    """Of the trainer; `local` is a model in the test process."""
    tied: bool = False
    dtype: str = "bfloat16"
    ranks: int = 1
    """Tensor-parallel ranks of the engine."""
    intermediate_size: int = 256


CASES = {
    "qwen2": Case("qwen2", "fsdp", tied=True),
    "qwen3": Case("qwen3", "fsdp2", ranks=2),
    "qwen3_moe": Case("qwen3_moe", "fsdp2", intermediate_size=144),
    "megatron": Case("qwen3", "megatron"),
    "llama": Case("llama", "local", tied=True, dtype="float32"),
}
ACTOR = {"megatron": {"megatron": {"pipeline_model_parallel_size": NUM_RANKS, "dtype": "float32"}}}
"""Sections of the actor's configuration, by strategy."""


@dataclass(frozen=True)
class Line:
    """One model from the trainer to the engine, which serves its weights."""

    trainer: LocalTrainer | FSDPTrainer
    replica: InspectedVLLMReplica
    config: PretrainedConfig
    case: Case


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


@contextmanager
def in_service(replica: RolloutReplica, trainer: LocalTrainer | FSDPTrainer) -> Iterator[None]:
    """The engine runs as long as the block, with the trainer's weights; the trainer is closed with it."""

    async def start() -> None:
        await replica.init_standalone()
        await trainer.manager.add_replicas([replica])

    async def end() -> None:
        await replica.shutdown()
        await trainer.close()

    try:
        asyncio.run(start())
        yield
    finally:
        asyncio.run(end())


@contextmanager
def served(name: str, trainer: LocalTrainer | FSDPTrainer, path: Path, directory: Path) -> Iterator[Line]:
    case = CASES[name]
    replica = InspectedVLLMReplica(list(CASES).index(name), path, directory, dtype=case.dtype, ranks=case.ranks)
    with in_service(replica, trainer):
        yield Line(trainer, replica, AutoConfig.from_pretrained(path), case)


@pytest.fixture(scope="session")
def llama_line(
    ray_cluster: None, model_paths: dict[str, Path], shm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Line]:
    """The one that test files share: its trainer is quick and can break anywhere."""
    path = model_paths["llama"]
    trainer = LocalTrainer(path, CASES["llama"].dtype, shm_dir / "llama")
    with served("llama", trainer, path, tmp_path_factory.mktemp("llama") / "served") as line:
        yield line


@pytest.fixture(scope="module")
def line(
    request: pytest.FixtureRequest,
    ray_cluster: None,
    model_paths: dict[str, Path],
    shm_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Line]:
    """The case that the test names. One after the other: all at the same time would take most of the memory."""
    name: str = request.param
    if name == "llama":
        yield request.getfixturevalue("llama_line")
        return
    case, path, directory = CASES[name], model_paths[name], tmp_path_factory.mktemp(name)
    (directory / "export").mkdir()
    trainer = FSDPTrainer(
        path, case.strategy, case.dtype, shm_dir / name, directory / "export", **ACTOR.get(case.strategy, {})
    )
    with served(name, trainer, path, directory / "served") as line:
        yield line


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
