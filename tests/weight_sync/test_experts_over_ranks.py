"""One replica of two data-parallel ranks, each with half of the experts: a real vLLM on CPUs, over every version."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoint_engine.fakes import RowShardedSource
from tests.processes import wait_until_gone
from tests.weight_sync.conftest import running
from tests.weight_sync.expected import expected_on_rank, same_bits
from tests.weight_sync.greedy import greedy_tokens, hugging_face_tokens
from tests.weight_sync.replicas import InspectedVLLMReplica
from tests.weight_sync.trainers import CONFIG, NUM_RANKS, Trainer
from tests.workers.rollout.test_death import assert_dead_soon, server_process
from verl.checkpoint_engine.errors import SyncAborted
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank
from verl.utils.builtin import make_tiny_model
from verl.workers.rollout import SamplingOptions, TokenOutput
from verl.workers.rollout.errors import ReplicaDied

pytestmark = pytest.mark.vllm

VERSIONS = (1, 2, 3)
DATA_RANKS = 2
PROMPT = [5, 4, 3, 2]
ROUNDING = 2e-4
"""Between two implementations in float32."""
KEEPING = replace(CONFIG, pause_mode="keep")


class Versions(Trainer):
    """Two trainer ranks that share the rows of a checkpoint, and read another one into its place to train."""

    def __init__(self, models: dict[int, Path], shm_dir: Path, *, without: str = "") -> None:
        """`without`: tensors whose names contain it are not sent."""
        self._models, self._without = models, without
        self._live = {name: tensor.clone() for name, tensor in self._read(1).items()}
        ranks = [
            TrainerRank(rank, RowShardedSource(self._live, rank, NUM_RANKS, "float32"), KEEPING)
            for rank in range(NUM_RANKS)
        ]
        shm_dir.mkdir()
        node = RolloutNode(0, KEEPING, job="versions", shm_dir=shm_dir)
        self.manager = CheckpointEngineManager(config=KEEPING, trainers=ranks, nodes=[node])

    def _read(self, number: int) -> dict[str, torch.Tensor]:
        weights = load_file(self._models[number] / "model.safetensors")
        return {name: tensor for name, tensor in weights.items() if not self._without or self._without not in name}

    def train(self) -> None:
        for name, tensor in self._read(self.version % len(VERSIONS) + 1).items():
            self._live[name].copy_(tensor)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._live.items()}


@dataclass(frozen=True)
class Dealt:
    replica: InspectedVLLMReplica
    trainer: Versions
    models: dict[int, Path]

    def hugging_face(self, version: int) -> PreTrainedModel:
        """Versions go round."""
        return AutoModelForCausalLM.from_pretrained(self.models[(version - 1) % len(VERSIONS) + 1]).eval()

    async def generate(self, request_id: str, *, tokens: int = 24, seed: int = 0) -> TokenOutput:
        sampling = SamplingOptions(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=seed)
        output: TokenOutput = await self.replica.server_handle.generate.remote(PROMPT, sampling, request_id)
        return output


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Far from each other: the weights that a tiny model is born with hardly matter to what it says."""
    directory = tmp_path_factory.mktemp("versions")
    paths = {}
    for number in VERSIONS:
        path = make_tiny_model(directory / str(number), "qwen3_moe", hidden_size=128, intermediate_size=144)
        model = AutoModelForCausalLM.from_pretrained(path)
        noise = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.15)
        model.save_pretrained(path)
        paths[number] = path
    return paths


@pytest.fixture(scope="module")
def dealt(
    ray_cluster: None, models: dict[int, Path], shm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dealt]:
    directory = tmp_path_factory.mktemp("dealt") / "served"
    replica = InspectedVLLMReplica(30, models[1], directory, dtype="float32", ranks=1, data_ranks=DATA_RANKS)
    trainer = Versions(models, shm_dir / "dealt")
    with running(replica):
        try:
            asyncio.run(trainer.manager.add_replicas([replica]))
            yield Dealt(replica, trainer, models)
        finally:
            asyncio.run(trainer.close())


@torch.inference_mode()
def log_probs(model: PreTrainedModel, response: list[int]) -> list[float]:
    """What Hugging Face says about a response to PROMPT."""
    logits = model(torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def with_experts_of(model: PreTrainedModel, older: PreTrainedModel, experts: slice) -> PreTrainedModel:
    """`model` with some experts of `older`, as a rank would have them that missed the version."""
    with torch.no_grad():
        for (name, new), (_, old) in zip(model.named_parameters(), older.named_parameters(), strict=True):
            if ".experts." in name:
                new[experts].copy_(old[experts])
    return model


async def test_a_version_without_an_expert_of_one_rank_is_refused_on_all_and_the_next_one_served(
    dealt: Dealt, own_shm_dir: Path
):
    """The first of all: one rank finds nothing wrong with it, and must not think that its engine has been compared."""
    lacking = Versions(dealt.models, own_shm_dir / "lacking", without=".experts.0.")
    try:
        await lacking.manager.add_replicas([dealt.replica])
        with pytest.raises(SyncAborted, match=r"rank 0: .* does not find some experts among the weights"):
            await lacking.sync()
    finally:
        await lacking.close()
    await dealt.trainer.train_and_sync()
    version = dealt.trainer.version
    assert await greedy_tokens(dealt.replica, version) == hugging_face_tokens(dealt.hugging_face(version))


async def test_every_rank_computes_with_its_experts_of_every_version_bit_for_bit(dealt: Dealt):
    for _ in VERSIONS:
        report = await dealt.trainer.train_and_sync()
        assert report.replicas_updated == (dealt.replica.name,)
        config = dealt.hugging_face(report.version).config
        served = dealt.replica.served_weights(report.version)
        assert len(served) == DATA_RANKS
        for rank, found in enumerate(served):
            expected = expected_on_rank(dealt.trainer.weights(), config, rank, 1, DATA_RANKS)
            assert found.keys() == expected.keys()
            assert [name for name, tensor in expected.items() if not same_bits(found[name], tensor)] == [], rank


async def test_tokens_and_log_probs_are_those_of_each_version_and_of_no_other(dealt: Dealt):
    """The last control is a replica one rank of which missed the version: the comparison sees it."""
    for _ in VERSIONS:
        await dealt.trainer.train_and_sync()
        version = dealt.trainer.version
        now, before = dealt.hugging_face(version), dealt.hugging_face(version - 1)
        tokens = await greedy_tokens(dealt.replica, version)
        assert tokens == hugging_face_tokens(now)
        assert tokens != hugging_face_tokens(before)
        # One request: the other rank has none, and takes part for the sake of its experts.
        alone = await dealt.generate(f"alone-{version}")
        assert alone.log_probs is not None
        assert furthest(alone.log_probs, log_probs(now, alone.token_ids)) < ROUNDING
        assert furthest(alone.log_probs, log_probs(before, alone.token_ids)) > 100 * ROUNDING
        half = len(range(now.config.num_experts)) // DATA_RANKS
        for experts in (slice(0, half), slice(half, None)):
            torn = with_experts_of(dealt.hugging_face(version), before, experts)
            assert furthest(alone.log_probs, log_probs(torn, alone.token_ids)) > 100 * ROUNDING


async def test_tokens_of_requests_in_flight_are_each_of_one_version_on_all_ranks(dealt: Dealt):
    """Both ranks are busy when versions change: what is said of a token is computed from all the experts of one."""
    numbers, done = itertools.count(), False

    async def ask_again() -> list[TokenOutput]:
        outputs = []
        while not done:
            number = next(numbers)
            outputs.append(await dealt.generate(f"busy-{dealt.trainer.version}-{number}", tokens=100, seed=number))
        return outputs

    askers = [asyncio.ensure_future(ask_again()) for _ in range(2 * DATA_RANKS)]
    for _ in VERSIONS:
        await dealt.trainer.train_and_sync()
    done = True
    outputs = [output for asked in askers for output in await asked]
    spans = [span for output in outputs for span in output.weight_versions]
    models = {version: dealt.hugging_face(version) for version in {span.version for span in spans}}
    assert len(spans) > len(outputs)  # some responses went on with another version
    for output in outputs:
        assert output.log_probs is not None
        for span in output.weight_versions:
            part = slice(span.start, span.stop)
            expected = log_probs(models[span.version], output.token_ids)
            assert furthest(output.log_probs[part], expected[part]) < ROUNDING, (span, output.weight_versions)


async def test_a_rank_that_dies_is_named_and_the_replica_starts_again_whole(dealt: Dealt):
    replica = dealt.replica
    await dealt.trainer.train_and_sync()
    await replica.pause("keep")
    parked = asyncio.ensure_future(dealt.generate("parked"))
    server = await server_process(replica)
    family = server.children(recursive=True)
    worker = psutil.Process(replica.worker_pid(1))
    assert worker in family
    worker.kill()
    died = f"its worker 1 (pid {worker.pid}, data-parallel rank 1) was ended by SIGKILL"
    await assert_dead_soon(replica, died)
    with pytest.raises(ReplicaDied, match=re.escape(died)):
        await asyncio.wait_for(parked, 120)
    await replica.launch_servers()
    assert wait_until_gone(family) == []
    await dealt.trainer.train_and_sync()
    version = dealt.trainer.version
    assert await greedy_tokens(replica, version) == hugging_face_tokens(dealt.hugging_face(version))
