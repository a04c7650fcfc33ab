"""After every sync, every rank of vLLM computes with the trainer's weights, bit for bit, and nothing was gathered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.weight_sync.conftest import CASES, Line
from tests.weight_sync.expected import expected_on_rank, same_bits
from tests.weight_sync.greedy import greedy_tokens, hugging_face_tokens
from tests.weight_sync.trainers import FSDPTrainer, LocalTrainer

pytestmark = pytest.mark.vllm

NUM_VERSIONS = 3


def assert_served(line: Line, version: int, weights: dict[str, torch.Tensor], ranks: int) -> None:
    for rank, found in enumerate(line.replica.served_weights(version)):
        expected = expected_on_rank(weights, line.config, rank, ranks)
        assert found.keys() == expected.keys()
        different = [key for key, tensor in expected.items() if not same_bits(found[key], tensor)]
        assert different == [], f"version {version}, rank {rank}"


@pytest.mark.parametrize("line", [name for name in CASES if name != "llama"], indirect=True)
async def test_a_sync_starts_no_collective_and_gathers_nothing(line: Line, tmp_path: Path):
    trainer = line.trainer
    assert isinstance(trainer, FSDPTrainer)
    trainer.group.watch()
    trainer.train()
    for collectives, _ in trainer.group.watched():
        assert collectives > 0
    if line.case.strategy.startswith("fsdp"):
        trainer.group.watch()
        trainer.group.export_hf(str(tmp_path), "float32")
        for _, gathers in trainer.group.watched():
            assert gathers

    trainer.group.watch()
    report = await trainer.sync()
    assert trainer.group.watched() == [(0, {})] * line.case.trainer_ranks
    assert report.nbytes_moved == report.nbytes_needed > 0


@pytest.mark.parametrize("line", CASES, indirect=True)
async def test_every_rank_computes_with_the_cast_weights_of_the_trainer_after_every_sync(line: Line):
    before: dict[str, torch.Tensor] = {}
    for _ in range(NUM_VERSIONS):
        report = await line.trainer.train_and_sync()
        assert report.replicas_updated == (line.replica.name,)
        weights = line.trainer.weights()
        assert [key for key, tensor in weights.items() if key in before and torch.equal(tensor, before[key])] == []
        assert_served(line, report.version, weights, line.case.ranks)
        before = weights


async def test_greedy_tokens_equal_those_of_hugging_face_after_every_sync(llama_line: Line):
    """In float32, where the two implementations round alike enough never to disagree about the likeliest token."""
    line = llama_line
    assert isinstance(line.trainer, LocalTrainer)
    before: list[list[int]] = []
    for _ in range(NUM_VERSIONS):
        await line.trainer.train_and_sync()
        tokens = await greedy_tokens(line.replica, line.trainer.version)
        assert tokens == hugging_face_tokens(line.trainer.model)
        assert tokens != before
        before = tokens
