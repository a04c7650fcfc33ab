"""The parts of the transformers engine that need no server."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from verl.checkpoint_engine.errors import ActivationError
from verl.utils.builtin.tiny import make_tiny_model
from verl.utils.config import ConfigError
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.errors import NotFinite
from verl.workers.rollout.hf.batch import DecodeBatch
from verl.workers.rollout.hf.engine import HFEngine
from verl.workers.rollout.hf.routes import RouteWatch
from verl.workers.rollout.hf.sampling import process, sample
from verl.workers.rollout.hf.weights import load_weights
from verl.workers.rollout.records import SamplingOptions


@pytest.fixture
def model(tiny_models):
    return AutoModelForCausalLM.from_pretrained(tiny_models[1]).eval()


def test_rows_are_sampled_by_their_own_options():
    logits = torch.tensor([[0.0, 1.0, 3.0]]).repeat(3, 1)
    options = [
        SamplingOptions(max_tokens=1, temperature=0.0),
        SamplingOptions(max_tokens=1, top_k=1, temperature=0.5),
        SamplingOptions(max_tokens=1, temperature=0.5),
    ]
    generators = [torch.Generator().manual_seed(0)] * 3
    tokens, log_probs = sample(logits, options, generators)
    assert tokens[:2] == [2, 2]
    assert log_probs[0] == pytest.approx(logits[0].log_softmax(-1)[2].item())
    assert log_probs[1] == 0.0
    assert log_probs[2] == pytest.approx((logits[0] / 0.5).log_softmax(-1)[tokens[2]].item())


def test_top_p_keeps_the_smallest_set_with_that_mass():
    log_probs = process(torch.tensor([[0.6, 0.3, 0.1]]).log(), SamplingOptions(max_tokens=1, top_p=0.8))
    assert log_probs.exp()[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])


def test_sampled_tokens_follow_the_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    tokens, _ = sample(logits, [SamplingOptions(max_tokens=1)] * 4000, [generator] * 4000)
    shares = torch.bincount(torch.tensor(tokens), minlength=3) / 4000
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_a_padded_batch_with_cache_says_what_each_sequence_alone_says(model):
    sequences = [[5, 6, 7, 8, 9], [11], [12, 13, 14]]
    batch = DecodeBatch(model)
    rows = [0, 1, 2]
    for step in range(6):
        if step == 3:
            rows = [0, 2]
            batch.keep(rows)
        if step == 5:
            batch.forget()
        logits = batch.next_logits([sequences[row] for row in rows])
        for row, found in zip(rows, logits, strict=True):
            with torch.inference_mode():
                alone = model(torch.tensor([sequences[row]])).logits[0, -1]
            torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)
            sequences[row].append(20 + step)


def test_weights_that_do_not_fit_are_all_named_and_nothing_is_written(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    tensors["model.new"] = torch.zeros(1)
    with pytest.raises(ActivationError, match="3 tensors") as failure:
        load_weights(model, model.config, tensors)
    for text in ("unexpected model.new", "missing lm_head.weight", "model.norm.weight: (64,) in the model"):
        assert text in str(failure.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_tied_weight_is_there_under_any_of_its_names(tmp_path):
    directory = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tensors = {name: tensor + 1 for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    load_weights(model, model.config, tensors)
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_a_head_of_its_own_is_refused_where_the_model_has_the_embedding(tmp_path):
    directory = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tensors = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    load_weights(model, model.config, tensors)
    before = tensors["model.embed_tokens.weight"].clone()
    other = {name: tensor + 1 for name, tensor in tensors.items()} | {"lm_head.weight": before + 2}
    with pytest.raises(ActivationError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_weights(model, model.config, other)
    assert torch.equal(model.lm_head.weight, before)


def test_stacked_experts_are_loaded_one_by_one(tmp_path):
    directories = [make_tiny_model(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in range(2)]
    model, other = (AutoModelForCausalLM.from_pretrained(directory) for directory in directories)
    tensors = load_file(directories[1] / "model.safetensors")
    load_weights(model, model.config, tensors)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(
        ActivationError, match=r"1 tensors .*missing model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"
    ):
        load_weights(model, model.config, tensors)


def chosen_by(path, tokens):
    """The experts of every token of a sequence [tokens, layers, k], by its model in one pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    return torch.stack(found, dim=1).numpy()


async def test_the_engine_tells_the_experts_of_every_token_that_it_read(tmp_path):
    path = make_tiny_model(tmp_path / "moe", "qwen3_moe")
    config = RolloutConfig(
        name="hf",
        dtype="float32",
        load_format="auto",
        max_num_seqs=2,  # so that requests join, and what others have read is read once more
        enable_rollout_routing_replay=True,
        ignore_eos=True,
    )
    spec = EngineSpec(
        name="replica-0",
        engine="verl.workers.rollout.hf.engine:HFEngine",
        config=config,
        model=HFModelConfig(path=str(path)),
        device="cpu",
        max_model_len=64,
        seed=1,
    )
    engine = HFEngine(spec)
    await engine.start()
    prompts = [[5, 6, 7, 8, 9], [11], [12, 13, 14]]
    outputs = await asyncio.gather(
        *(
            engine.generate(prompt, SamplingOptions(max_tokens=3 + 2 * row, ignore_eos=True), str(row))
            for row, prompt in enumerate(prompts)
        )
    )
    await engine.shutdown()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = chosen_by(path, [*prompt, *output.token_ids])[:-1]  # the last token was not read
        assert np.array_equal(np.sort(output.routed_experts), np.sort(expected))


async def test_weights_that_give_no_probabilities_fail_requests_and_not_the_engine(tiny_models):
    engine = HFEngine(
        EngineSpec(
            name="replica-0",
            engine="hf",
            config=RolloutConfig(name="hf", load_format="auto"),
            model=HFModelConfig(path=str(tiny_models[1])),
            device="cpu",
            max_model_len=64,
            seed=1,
        )
    )
    await engine.start()
    norm = engine._model.get_parameter("model.norm.weight")
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(float("inf"))
    request = ([5, 6, 7], SamplingOptions(max_tokens=2, ignore_eos=True))
    asked = [engine.generate(*request, str(number)) for number in range(2)]
    for failure in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(failure, NotFinite)
        assert str(failure).startswith("replica-0: the policy's logits are not finite with the weights of version -1")
    await engine.health()
    with torch.no_grad():
        norm.copy_(kept)
    assert len((await engine.generate(*request, "later")).token_ids) == 2
    await engine.shutdown()


def test_a_model_without_routers_is_told(model):
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no routers"):
        RouteWatch(model)
