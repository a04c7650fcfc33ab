"""Updates drop nothing: their log-probs are the old ones, and their gradients are those of transformers' eval mode."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.models import cases
from tests.models.architectures import ARCHITECTURES, write_checkpoint
from tests.workers.engine.engine_cases import make_engine
from verl.utils.config import ConfigError
from verl.workers.config.critic import CriticModelConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.engine.micro_batches import MicroBatchLimits

GPT2 = {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3}
LAYERS = {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3, "layerdrop": 0.3}
FAMILIES = {
    "seed_oss": {"attention_dropout": 0.3, "residual_dropout": 0.3},
    "qwen2": {"attention_dropout": 0.3},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neo": {"attention_dropout": 0.3, "embed_dropout": 0.3, "resid_dropout": 0.3},
    "opt": LAYERS,
    "xglm": LAYERS,
    "biogpt": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3} | LAYERS,
    "bloom": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "phi": {"embd_pdrop": 0.3, "resid_pdrop": 0.3, "attention_dropout": 0.3},
    "mixtral": {"attention_dropout": 0.3, "router_jitter_noise": 0.3},
    "phimoe": {"attention_dropout": 0.3, "input_jitter_noise": 0.3},
    "gemma3n_text": {"altup_coef_clip": 0.05},
    "dbrx": {"resid_pdrop": 0.3, "attn_config": {"attn_pdrop": 0.3}, "ffn_config": {"moe_jitter_eps": 0.3}},
}
"""Fields of each configuration that are not 0 here, or clip. `phimoe` draws experts whatever its fields say."""
CHECKPOINTED = {"enable_gradient_checkpointing": True}


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def dropping(tmp_path):
    """`dropping(name)`: the directory of a model whose configuration has dropout."""

    def write(name: str):
        directory = tmp_path / name
        write_checkpoint(ARCHITECTURES[name], directory)
        file = directory / "config.json"
        config = json.loads(file.read_text())
        for field, value in FAMILIES[name].items():
            config[field] = config.get(field, {}) | value if isinstance(value, dict) else value
        file.write_text(json.dumps(config))
        return directory

    return write


def numbered_batch():
    """`cases.padded_batch` with the number of each row: micro-batches have them in another order."""
    data = cases.padded_batch()
    data.batch["row"] = torch.arange(len(data))
    return data


def one_update(engine, data) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs [b, R] in the update, and the gradient of their sum by parameter."""
    seen, gradients = {}, {}

    def loss(log_prob, entropy, micro_batch, totals):
        assert entropy is None
        seen["log_prob"] = log_prob.detach()[micro_batch.batch["row"].argsort()]
        return log_prob.sum(), {}

    def keep_gradients() -> None:
        gradients.update(
            (name, parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad)
            for name, parameter in engine.model.named_parameters()
            if parameter.grad is not None
        )

    engine._before_step = keep_gradients
    engine.train_mini_batch(data, loss, temperature=1.0, limits=MicroBatchLimits(max_sequences=len(data)))
    return seen["log_prob"], gradients


def gradients_in_evaluation_mode(directory, data) -> dict[str, torch.Tensor]:
    """Of transformers alone, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    for row in range(len(data)):
        ids = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        num_response = int(data.batch["response_mask"][row].sum())
        logits = model(input_ids=ids[None], use_cache=False).logits[0, -num_response - 1 : -1]
        logits.log_softmax(-1).gather(-1, ids[-num_response:, None]).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_ratio_is_one_and_gradients_are_those_of_evaluation_mode(name, dropping):
    directory, data = dropping(name), numbered_batch()
    engine = make_engine(directory, grad_clip=1e9)
    before = cases.log_probs(engine, data)
    during, gradients = one_update(engine, data)
    assert torch.equal(during, before)
    expected = gradients_in_evaluation_mode(directory, data)
    assert gradients.keys() >= expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for parameter, gradient in expected.items():
        assert (gradients[parameter] - gradient).abs().max() < 1e-5 * largest, parameter


@pytest.mark.parametrize("name", ["seed_oss", "opt", "phimoe"])
def test_it_is_one_where_activations_are_recomputed(name, dropping):
    data = numbered_batch()
    engine = make_engine(dropping(name), model=CHECKPOINTED)
    before = cases.log_probs(engine, data)
    assert torch.equal(one_update(engine, data)[0], before)


def test_fsdp1_drops_nothing_either(dropping):
    data = numbered_batch()
    engine = make_engine(dropping("seed_oss"), strategy="fsdp")
    before = cases.log_probs(engine, data)
    assert torch.equal(one_update(engine, data)[0], before)


@pytest.mark.parametrize("name", ["seed_oss", "gpt2", "phimoe"])
def test_dropout_that_is_kept_drops(name, dropping):
    data = numbered_batch()
    engine = make_engine(dropping(name), model={"dropout": "keep"})
    before = cases.log_probs(engine, data)
    assert (one_update(engine, data)[0] - before).abs().max() > 0.1


def test_an_export_has_the_dropout_of_the_directory(dropping, tmp_path):
    directory = dropping("seed_oss")
    make_engine(directory).export_hf(tmp_path / "export")
    assert (tmp_path / "export" / "config.json").read_text() == (directory / "config.json").read_text()


def test_a_critic_drops_nothing_and_its_export_says_what_the_policy_said(dropping, tmp_path):
    from verl.workers.config import FSDPConfig, OptimizerConfig
    from verl.workers.engine.fsdp.value import FSDP2ValueEngine

    data = numbered_batch()
    engine = FSDP2ValueEngine(
        model_config=HFModelConfig(path=str(dropping("qwen2"))),
        fsdp_config=FSDPConfig(dtype="float32"),
        optim_config=OptimizerConfig(lr=1e-2),
    )
    engine.build()
    limits = MicroBatchLimits(max_sequences=len(data))
    with torch.no_grad():  # it starts with a head of zeros
        engine.model.score.weight.to_local().normal_()
    before = engine.compute_values(data, limits=limits)
    assert torch.equal(one_update(engine, data)[0], before)
    engine.export_hf(tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["attention_dropout"] == 0.3


@pytest.mark.parametrize("section", [HFModelConfig, CriticModelConfig])
@pytest.mark.parametrize("override", [{"attention_dropout": 0.1}, {"text_config": {"resid_pdrop": 0.1}}])
def test_an_override_that_drops_needs_dropout_to_be_kept(section, override):
    with pytest.raises(ConfigError, match=r"override_config\..*=0.1, but with dropout=off .* set dropout=keep"):
        section(override_config=override)
    section(override_config=override, dropout="keep")
    section(override_config={"attention_dropout": 0.0, "drop_tokens": True})
