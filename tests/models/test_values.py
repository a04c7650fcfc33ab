"""Critics of every family: a value is a linear function of the last hidden state, through save, resume and export."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.models import cases
from tests.models.architectures import ARCHITECTURES, write_checkpoint
from verl.workers.config import FSDPConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine.fsdp.value import FSDP2ValueEngine
from verl.workers.engine.micro_batches import MicroBatchLimits

FAMILIES = [
    *("qwen3", "gpt2", "gpt_neox", "bloom", "falcon", "mpt", "opt", "biogpt", "phi", "gemma3_text", "gemma2", "olmo2"),
    *("granite", "deepseek_v2", "glm4_moe", "dbrx", "llama4_text", "jetmoe", "mamba2", "bamba", "qwen3_5_text", "lfm2"),
]
"""transformers has a head of its own for the first and for some others, over which ours are."""
LIMITS = MicroBatchLimits(max_sequences=4)
CONTENTS = ("model", "optimizer", "extra")


pytestmark = pytest.mark.usefixtures("one_rank")


def make_critic(directory) -> FSDP2ValueEngine:
    engine = FSDP2ValueEngine(
        model_config=HFModelConfig(path=str(directory)),
        fsdp_config=FSDPConfig(dtype="float32"),
        optim_config=OptimizerConfig(lr=1e-2),
    )
    engine.build()
    return engine


def step(engine, data) -> None:
    def loss(values, entropy, micro_batch, totals):
        return ((values - 1) ** 2 * micro_batch.batch["response_mask"]).sum(), {}

    engine.train_mini_batch(data, loss, temperature=1.0, limits=LIMITS)


def plain_values(directory, score, bias, data) -> torch.Tensor:
    """Of transformers' body, sequence by sequence; the state before a token values it."""
    model, _ = cases.reference(directory)
    name = next(name for name, child in model.named_children() if name in (model.base_model_prefix, "model"))
    found = torch.zeros(data.batch["responses"].shape)
    for row in range(len(data)):
        ids = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        num_response = int(data.batch["response_mask"][row].sum())
        with torch.no_grad():
            states = getattr(model, name)(ids[None], use_cache=False).last_hidden_state[0]
        found[row, :num_response] = (states @ score + bias)[-num_response - 1 : -1]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_values_are_those_of_the_body_and_survive_saves_and_exports(name, tmp_path):
    write_checkpoint(ARCHITECTURES[name], tmp_path / "policy")
    engine, data = make_critic(tmp_path / "policy"), cases.padded_batch()
    assert not engine.compute_values(data, limits=LIMITS).any()  # the head begins with zeros
    head = {parameter: tensor for parameter, tensor in engine.model.named_parameters() if "score" in parameter}
    score = torch.randn(head["score.weight"].shape)
    with torch.no_grad():
        whole = {"score.weight": score, "score.bias": torch.tensor([0.5])}
        for parameter, tensor in head.items():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(whole[parameter])
    expected = plain_values(tmp_path / "policy", score[0], 0.5, data)
    values = engine.compute_values(data, limits=LIMITS)
    assert values == pytest.approx(expected, abs=1e-4 * float(expected.abs().max()))
    step(engine, data)
    after = engine.compute_values(data, limits=LIMITS)
    assert (after - values).abs().max() > 1e-3
    engine.save_checkpoint(tmp_path / "state", CONTENTS)
    engine.export_hf(tmp_path / "export", "float32")
    resumed = make_critic(tmp_path / "policy")
    resumed.load_checkpoint(tmp_path / "state", CONTENTS)
    assert torch.equal(resumed.compute_values(data, limits=LIMITS), after)
    exported = make_critic(tmp_path / "export")
    assert exported.compute_values(data, limits=LIMITS) == pytest.approx(after, abs=1e-5)
    assert not [tensor for tensor in cases.file_tensors(tmp_path / "export") if "lm_head" in tensor]
