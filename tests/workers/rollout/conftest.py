"""Engines to test: the same tests run over every one of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.sglang_on_cpu import NEEDS_SGLANG
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.digest import Manifest, digest_pieces
from verl.checkpoint_engine.memory.slot import SlotView
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.utils.builtin.tiny import make_tiny_model
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import RolloutReplica, RolloutReplicaRegistry, SamplingOptions, TokenOutput
from verl.workers.rollout.errors import RolloutError

MAX_MODEL_LEN = 256
PROMPT = [3, 4, 5, 6]


class Trainer:
    """Stands for a trainer and its node: commits the weights of local models to an arena of its own."""

    def __init__(self, models: dict[int, Path], auto: Any = AutoModelForCausalLM) -> None:
        self.models = {
            version: auto.from_pretrained(path, dtype=torch.float32).eval() for version, path in models.items()
        }
        self._weights = {version: load_file(path / "model.safetensors") for version, path in models.items()}
        specs = [
            TensorSpec(name=name, shape=tuple(w.shape), dtype=str(w.dtype).removeprefix("torch."))
            for name, w in next(iter(self._weights.values())).items()
        ]
        self._layout = Layout.of(specs)
        shards = [Shard(spec.name, Box.whole(spec.shape)) for spec in specs]
        self._plan = make_plan(self._layout, [ShardTable.of(self._layout, shards)], block_nbytes=2**20)
        self._arena = NodeArena.create(
            shm_dir=Path("/dev/shm"), job=f"test-{uuid.uuid4().hex[:8]}", node="0", layout=self._layout, slots=2
        )
        self.arena_path = str(self._arena.directory)

    def commit(self, version: int) -> None:
        if self._arena.version == version:
            return
        slot = SlotView(self._arena.begin(version), self._layout, writable=True)
        for name, tensor in slot.tensors():
            tensor.copy_(self._weights[version][name])
        digests = digest_pieces(slot.bytes.numpy(), self._plan.extents)
        self._arena.commit(version, Manifest.of(version, self._plan, [digests]))
        slot.close()

    def log_probs(self, version: int, prompt: list[int], response: list[int], temperature: float) -> list[float]:
        """What Hugging Face says about `response` with the weights of `version`."""
        with torch.inference_mode():
            logits = self.models[version](torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        chosen = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
        return chosen[:, 0].tolist()

    def close(self) -> None:
        self._arena.close()


@dataclass
class Served:
    """A running replica whose weights come from `trainer`."""

    replica: RolloutReplica
    trainer: Trainer
    refusal: RolloutError | None = None
    """What `generate` said before the first activation."""
    ids: Iterator[str] = field(default_factory=lambda: (f"request-{n}" for n in range(10**6)))

    def submit(self, prompt: list[int] | None = None, **options: Any) -> Any:
        """Start one request; await what it returns."""
        sampling = SamplingOptions(**({"max_tokens": 8} | options))
        return self.replica.server_handle.generate.remote(prompt or PROMPT, sampling, next(self.ids))

    async def generate(self, prompt: list[int] | None = None, **options: Any) -> TokenOutput:
        return await self.submit(prompt, **options)

    async def serve(self, version: int) -> None:
        """Whatever a test before left: serve `version`, unpaused."""
        self.trainer.commit(version)
        await self.replica.pause("abort")
        await self.replica.activate(self.trainer.arena_path, version)
        await self.replica.resume()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two versions of one model."""
    directory = tmp_path_factory.mktemp("models")
    return {version: make_tiny_model(directory / str(version), seed=version) for version in (1, 2)}


@pytest.fixture(scope="session")
def make_replica(tiny_models: dict[int, Path]) -> Callable[..., RolloutReplica]:
    def make(engine: str, replica_rank: int = 0, **config: Any) -> RolloutReplica:
        defaults = {
            "name": engine,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "cpu_kvcache_gib": 0.1,
            "num_cpus": 0.1,
        }
        return RolloutReplicaRegistry.get(engine)(
            replica_rank=replica_rank,
            config=RolloutConfig(**(defaults | config)),
            model=HFModelConfig(path=str(tiny_models[1])),
        )

    return make


@pytest.fixture(scope="session")
def trainer(tiny_models: dict[int, Path]) -> Iterator[Trainer]:
    trainer = Trainer(tiny_models)
    yield trainer
    trainer.close()


ENGINES = [
    "hf",
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("sglang-on-cpu", marks=[pytest.mark.sglang, NEEDS_SGLANG]),
]


@pytest.fixture(scope="session", params=ENGINES)
def shared(
    request: pytest.FixtureRequest, ray_cluster: None, make_replica: Callable[..., RolloutReplica], trainer: Trainer
) -> Iterator[Served]:
    served = Served(make_replica(request.param), trainer)

    async def start() -> None:
        await served.replica.init_standalone()
        try:
            await served.generate()
        except RolloutError as exc:
            served.refusal = exc

    asyncio.run(start())
    yield served
    asyncio.run(served.replica.shutdown())


@pytest.fixture
async def served(shared: Served) -> Served:
    """The shared engine of this parameter, serving version 1."""
    await shared.serve(1)
    return shared
