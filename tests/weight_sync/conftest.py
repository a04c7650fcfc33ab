"""Models on their way from a trainer to a real vLLM. Engines take long to start and are shared by tests."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
    trainer_ranks: int = NUM_RANKS
    actor: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the actor's configuration."""

    def on_megatron(self, trainer_ranks: int, **parallel: int) -> Case:
        """The same model and engine."""
        actor = {"megatron": {"dtype": "float32", **parallel}}
        return replace(self, strategy="megatron", trainer_ranks=trainer_ranks, actor=actor)

    def same_engine(self, other: Case) -> bool:
        return self == replace(other, strategy=self.strategy, trainer_ranks=self.trainer_ranks, actor=self.actor)


DENSE = Case("qwen3", "fsdp2", ranks=2)
EXPERTS = Case("qwen3_moe", "fsdp2", intermediate_size=144)
CASES = {
    "qwen2": Case("qwen2", "fsdp", tied=True),
    "qwen3": DENSE,
    "megatron_tp2": DENSE.on_megatron(2, tensor_model_parallel_size=2),
    "megatron_pp2": DENSE.on_megatron(2, pipeline_model_parallel_size=2),
    "megatron_tp2_pp2": DENSE.on_megatron(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "qwen3_moe": EXPERTS,
    "megatron_ep2": EXPERTS.on_megatron(2, expert_model_parallel_size=2),
    "llama": Case("llama", "local", tied=True, dtype="float32"),
}
"""Neighbours that train the same model share an engine, which takes long to start."""


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
def running(replica: RolloutReplica) -> Iterator[None]:
    """The engine runs as long as the block."""
    try:
        asyncio.run(replica.init_standalone())
        yield
    finally:
        asyncio.run(replica.shutdown())


@contextmanager
def in_service(replica: RolloutReplica, trainer: LocalTrainer | FSDPTrainer) -> Iterator[None]:
    """An engine that runs serves the trainer's weights as long as the block; the trainer is closed with it."""
    try:
        asyncio.run(trainer.manager.add_replicas([replica]))
        yield
    finally:
        asyncio.run(trainer.close())


def inspected_replica(name: str, path: Path, directory: Path) -> InspectedVLLMReplica:
    case = CASES[name]
    return InspectedVLLMReplica(list(CASES).index(name), path, directory, dtype=case.dtype, ranks=case.ranks)


@pytest.fixture(scope="session")
def llama_line(
    ray_cluster: None, model_paths: dict[str, Path], shm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Line]:
    """The one that test files share: its trainer is quick and can break anywhere."""
    case, path = CASES["llama"], model_paths["llama"]
    trainer = LocalTrainer(path, case.dtype, shm_dir / "llama")
    replica = inspected_replica("llama", path, tmp_path_factory.mktemp("llama") / "served")
    with running(replica), in_service(replica, trainer):
        yield Line(trainer, replica, AutoConfig.from_pretrained(path), case)


class OneEngine:
    """Runs for one case after the other; all engines at the same time would take most of the memory."""

    def __init__(self, model_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
        self._model_paths = model_paths
        self._tmp_path_factory = tmp_path_factory
        self._started = ExitStack()
        self._case: Case | None = None
        self._replica: InspectedVLLMReplica

    def of(self, name: str) -> InspectedVLLMReplica:
        """The one that runs if it can serve case `name`, else a new one."""
        if self._case is None or not self._case.same_engine(CASES[name]):
            self.end()
            self._replica = inspected_replica(
                name, self._model_paths[name], self._tmp_path_factory.mktemp(name) / "served"
            )
            self._started.enter_context(running(self._replica))
            self._case = CASES[name]
        return self._replica

    def end(self) -> None:
        self._case = None
        self._started.close()


@pytest.fixture(scope="module")
def one_engine(
    ray_cluster: None, model_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OneEngine]:
    engine = OneEngine(model_paths, tmp_path_factory)
    yield engine
    engine.end()


@pytest.fixture(scope="module")
def line(
    request: pytest.FixtureRequest,
    one_engine: OneEngine,
    model_paths: dict[str, Path],
    shm_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Line]:
    """The case that the test names."""
    name: str = request.param
    if name == "llama":
        one_engine.end()
        yield request.getfixturevalue("llama_line")
        return
    case, path = CASES[name], model_paths[name]
    replica = one_engine.of(name)
    trainer = FSDPTrainer(
        path,
        case.strategy,
        case.dtype,
        shm_dir / name,
        tmp_path_factory.mktemp("export"),
        num_ranks=case.trainer_ranks,
        **case.actor,
    )
    with in_service(replica, trainer):
        yield Line(trainer, replica, AutoConfig.from_pretrained(path), case)


@pytest.fixture(scope="session")
def hf(ray_cluster: None, model_paths: dict[str, Path]) -> Iterator[RolloutReplica]:
    """A quick second engine for the weights of `llama`."""
    replica = RolloutReplicaRegistry.get("hf")(
        replica_rank=9,
        config=RolloutConfig(name="hf", dtype="float32", max_model_len=256, num_cpus=0.1, control_timeout_s=300),
        model=HFModelConfig(path=str(model_paths["llama"])),
    )
    asyncio.run(replica.init_standalone())
    yield replica
    asyncio.run(replica.shutdown())
