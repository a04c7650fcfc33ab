"""After every sync, every rank of vLLM computes with the trainer's weights, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.weight_sync.conftest import CASES, Line
from tests.weight_sync.expected import expected_on_rank, same_bits
from tests.weight_sync.greedy import greedy_tokens, hugging_face_tokens
from tests.weight_sync.trainers import LocalTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

NUM_VERSIONS = 3


def assert_served(line: Line, version: int, weights: dict[str, torch.Tensor], ranks: int) -> None:
    for rank, found in enumerate(line.replica.served_weights(version)):
        expected = expected_on_rank(weights, line.config, rank, ranks)
        assert found.keys() == expected.keys()
        different = [key for key, tensor in expected.items() if not same_bits(found[key], tensor)]
        assert different == [], f"version {version}, rank {rank}"


@pytest.mark.parametrize("name", CASES)
async def test_every_rank_computes_with_the_cast_weights_of_the_trainer_after_every_sync(
    lines: dict[str, Line], name: str
):
    line, ranks = lines[name], CASES[name].ranks
    before: dict[str, torch.Tensor] = {}
    for _ in range(NUM_VERSIONS):
        report = await line.trainer.train_and_sync()
        assert report.replicas_updated == (line.replica.name,)
        weights = line.trainer.weights()
        assert [key for key, tensor in weights.items() if key in before and torch.equal(tensor, before[key])] == []
        assert_served(line, report.version, weights, ranks)
        before = weights


async def test_greedy_tokens_equal_those_of_hugging_face_after_every_sync(lines: dict[str, Line]):
    """In float32, where the two implementations round alike enough never to disagree about the likeliest token."""
    line = lines["llama"]
    assert isinstance(line.trainer, LocalTrainer)
    before: list[list[int]] = []
    for _ in range(NUM_VERSIONS):
        await line.trainer.train_and_sync()
        tokens = await greedy_tokens(line.replica, line.trainer.version)
        assert tokens == hugging_face_tokens(line.trainer.model)
        assert tokens != before
        before = tokens
