"""Every architecture of the matrix that Megatron has a table of: computed, sent and exported as the checkpoint says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import cases
from tests.models.architectures import ARCHITECTURES
from tests.workers.engine.engine_cases import assemble, shown_by
from tests.workers.engine.megatron_cases import make_megatron
from tests.workers.engine.rank_pool import RankPool
from verl.workers.engine.megatron.architectures import ARCHITECTURES as TABLES

USUAL = "takes a checkpoint that has the model's tensors, each by itself under its usual name, and no others"
REFUSED = {
    "llama-dynamic": "computes plain rotary positions and Llama 3's",
    "llama-biased": "has no map for llama with attention_bias=True",
    "qwen3_moe-stacked": USUAL,
    "qwen3-mtp": USUAL,
    "llama-base": USUAL,
}
"""Architecture: what its refusal says. strategy=fsdp2 trains all of them."""
LAYOUTS: list[dict[str, Any]] = [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}]
NAMES = [architecture.name for architecture in ARCHITECTURES.values() if architecture.model_type in TABLES]


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def tried(directory: Path, export: Path, options: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    engine = make_megatron(directory, options)
    log_probs = cases.log_probs(engine, cases.padded_batch())
    engine.export_hf(export)
    return log_probs, shown_by(engine.weight_source("float32"))


@pytest.mark.parametrize("options", LAYOUTS, ids=["tp1", "tp2"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_megatron_computes_sends_and_exports_what_the_checkpoint_says(pool, checkpoints, tmp_path, name, options):
    directory = checkpoints(name)
    results = pool.run(tried, options.get("tensor_model_parallel_size", 1), directory, tmp_path, options)

    data, file = cases.padded_batch(), cases.file_tensors(directory)
    expected = cases.reference_log_probs(cases.reference(directory)[0], data)
    for log_probs, _ in results:
        assert (log_probs - expected).abs().amax(1).tolist() == pytest.approx([0.0] * len(data), abs=1e-4)
    sent = assemble([shown for _, shown in results])
    kept = {one for one in file if one.startswith(cases.EXTRA)} - sent.keys()
    assert cases.differences(sent, {one: tensor for one, tensor in file.items() if one not in kept}) == []
    assert cases.differences(cases.file_tensors(tmp_path), file) == []
    assert cases.reference(tmp_path)[1] == {}


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_cannot_take_is_refused_in_a_sentence(pool, checkpoints, tmp_path, name):
    with pytest.raises(AssertionError) as refusal:
        pool.run(tried, 1, checkpoints(name), tmp_path, {})
    line = next(line for line in str(refusal.value).splitlines() if "ConfigError: " in line)
    assert REFUSED[name] in line
    assert "strategy=fsdp2" in line
    assert len(line) < 1200
