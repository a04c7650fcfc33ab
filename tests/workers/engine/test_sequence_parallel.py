"""Ranks that share sequences compute what one rank computes that has them whole."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.models import cases
from tests.models.architectures import ARCHITECTURES, write_checkpoint
from tests.workers.engine.engine_cases import (
    assemble,
    assert_same_weights,
    batch,
    make_engine,
    own_rows,
    reference_log_probs,
    reference_steps,
    train,
    weighted_loss,
)
from tests.workers.engine.test_together import VARIANTS
from verl.utils.config import ConfigError
from verl.workers.config import CriticConfig, FSDPConfig, HFModelConfig, OptimizerConfig
from verl.workers.critic import CriticLoss
from verl.workers.engine.fsdp.value import FSDP2ValueEngine
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.hf.splitting import why_not_shared

SMALL = MicroBatchLimits(max_tokens=24)
WHOLE = MicroBatchLimits(max_sequences=100)
FSDP1 = {"strategy": "fsdp"}


def shared(size, **fsdp):
    return {"fsdp": {"ulysses_sequence_parallel_size": size} | fsdp}


def log_probs(path, data, limits, options):
    engine = make_engine(path, **options)
    return engine.compute_log_prob(own_rows(data), temperature=0.7, limits=limits, calculate_entropy=True)


@pytest.mark.parametrize(
    ("architecture", "world_size", "limits", "options"),
    [
        pytest.param("qwen2", 2, WHOLE, shared(2), id="two ranks"),
        pytest.param("qwen3", 2, SMALL, shared(2) | FSDP1, id="fsdp1, several micro-batches"),
        pytest.param("qwen3_moe", 2, SMALL, shared(2), id="experts"),
        pytest.param("llama", 4, MicroBatchLimits(max_sequences=1), shared(2), id="two pairs, single sequences"),
        pytest.param("llama", 4, WHOLE, shared(4), id="more ranks than heads of keys"),
    ],
)
def test_log_probs_and_entropies_equal_those_of_each_sequence_alone(
    ranks, models, architecture, world_size, limits, options
):
    path, data = models(architecture), batch(8)
    with torch.no_grad():
        expected = reference_log_probs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), data, 0.7)
    results = ranks.run(log_probs, world_size, path, data, limits, options)
    for place in (0, 1):
        found = torch.cat([result[place] for result in results])
        torch.testing.assert_close(found, expected[place], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "tied", "world_size", "limits", "options"),
    [
        pytest.param("qwen2", True, 2, WHOLE, shared(2), id="two ranks"),
        pytest.param("qwen3", False, 2, SMALL, shared(2) | FSDP1, id="fsdp1"),
        pytest.param("qwen3_moe", False, 2, SMALL, shared(2), id="experts"),
        pytest.param("llama", False, 4, SMALL, shared(2), id="two pairs"),
        pytest.param("llama", True, 4, WHOLE, shared(2, fsdp_size=2), id="two pairs that replicate each other"),
        pytest.param("qwen2", False, 4, SMALL, shared(4), id="more ranks than heads of keys"),
        pytest.param(
            "qwen2", True, 2, SMALL, shared(2) | {"model": {"enable_gradient_checkpointing": True}}, id="recomputed"
        ),
        pytest.param("qwen2", True, 2, MicroBatchLimits(max_sequences=1), shared(2), id="parts without a response"),
    ],
)
def test_steps_equal_those_of_one_process_that_has_the_sequences_whole(
    ranks, models, architecture, tied, world_size, limits, options
):
    path, data = models(architecture, tied), batch(12)
    loss, norm, weights = reference_steps(path, [data, data], temperature=0.7, grad_clip=0.5)
    results = ranks.run(train, world_size, path, data, limits, options, 2)
    for metrics, _ in results:
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["tokens"] == pytest.approx(1.0)
    assert_same_weights(assemble([parts for _, parts in results]), weights)


def values(path, data, size):
    engine = FSDP2ValueEngine(
        model_config=HFModelConfig(path=str(path), use_remove_padding=True),
        fsdp_config=FSDPConfig(dtype="float32", ulysses_sequence_parallel_size=size),
        optim_config=OptimizerConfig(lr=1e-2),
    )
    engine.build()
    rows = own_rows(data)
    for _ in range(2):  # a new head is zero: before the first step every value is
        engine.train_mini_batch(rows, CriticLoss(CriticConfig()), temperature=1.0, limits=SMALL)
    return engine.compute_values(rows, limits=SMALL)


def test_a_critic_whose_sequences_are_shared_learns_the_same_values(ranks, models):
    path, data = models("qwen3"), batch(8)
    data.batch["values"] = torch.zeros(data.batch["responses"].shape)
    data.batch["returns"] = data.batch["advantages"]
    alone = ranks.run(values, 1, path, data, 1)[0]
    shared_values = torch.cat(ranks.run(values, 2, path, data, 2))
    assert alone.abs().max() > 0.01
    torch.testing.assert_close(shared_values, alone, rtol=0, atol=1e-5)


def train_and_save(path, data, directory):
    engine = make_engine(path, **shared(2))
    engine.train_mini_batch(own_rows(data), weighted_loss, temperature=1.0, limits=WHOLE)
    engine.save_checkpoint(directory, ["model", "optimizer", "extra"])
    return engine.compute_log_prob(own_rows(data), temperature=1.0, limits=WHOLE)[0]


def load_alone(path, data, directory):
    engine = make_engine(path)
    engine.load_checkpoint(directory, ["model", "optimizer", "extra"])
    return engine.compute_log_prob(own_rows(data), temperature=1.0, limits=WHOLE)[0]


def test_a_checkpoint_of_ranks_that_share_sequences_is_loaded_by_one_that_does_not(ranks, models, tmp_path):
    path, data = models("qwen2"), batch(4)
    saved = torch.cat(ranks.run(train_and_save, 2, path, data, tmp_path))
    torch.testing.assert_close(ranks.run(load_alone, 1, path, data, tmp_path)[0], saved, rtol=0, atol=1e-5)


def draws(path):
    def drawn(log_prob, entropy, micro_batch, totals):
        loss, metrics = weighted_loss(log_prob, entropy, micro_batch, totals)
        return loss, metrics | {"drawn": torch.rand(1), "squared": torch.rand(1) ** 2}

    torch.manual_seed(dist.get_rank())
    engine = make_engine(path, **shared(2))
    seen = []

    def seeing(*arguments):
        loss, metrics = drawn(*arguments)
        seen.append(float(metrics["drawn"]))
        return loss, metrics

    engine.train_mini_batch(own_rows(batch(4)), seeing, temperature=1.0, limits=WHOLE)
    return seen[0], float(torch.rand(1))


def test_a_loss_draws_the_same_on_ranks_that_share_sequences_and_nothing_else_does(ranks, models):
    in_loss, after = zip(*ranks.run(draws, 4, models("qwen2")), strict=True)
    assert in_loss[0] == in_loss[1]
    assert in_loss[2] == in_loss[3]
    assert in_loss[0] != in_loss[2]
    assert len(set(after)) == 4


STATES, EAGER, OWN = "states beside keys and values", "computes attention by 'eager'", "does not let its attention be"
INDEXED = "layers of another kind than attention over all heads: indexed_attention"
LONGEST = "stretches positions as the largest one in a call asks"
REFUSED = {
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"), STATES),
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"), STATES),
    **dict.fromkeys(("qwen3_next", "recurrent_gemma", "zamba2", "qwen3_5", "qwen3_5_moe", "xlstm", "rwkv"), STATES),
    **dict.fromkeys(("deepseek_v4", "zamba", "zaya", "qwen4_exp_text"), STATES),
    **dict.fromkeys(("bloom", "codegen", "falcon-alibi", "gemma2", "gpt_neo", "gpt_oss", "gptj", "mpt"), EAGER),
    **dict.fromkeys(("vaultgemma", "xglm", "granite_swa", "granitemoe_swa", "mimo_v2_flash"), EAGER),
    **dict.fromkeys(("gpt_neox_japanese", "openai-gpt", "trocr"), EAGER),
    **dict.fromkeys(("biogpt", "falcon", "stablelm", "blt"), OWN),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"), INDEXED),
    **dict.fromkeys(("phi3-longrope", "llama-dynamic"), LONGEST),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "layers of another kind than attention over all heads: conv"),
    "minimax_m3_vl_text": "layers of another kind than attention over all heads: minimax_m3_sparse",
    "inkling_text": "layers of another kind than attention over all heads: hybrid, hybrid_sliding",
    "minimax": "layers of another kind than attention over all heads: linear_attention",
    **dict.fromkeys(("llama4", "llama4_text"), "scales queries by their place in the row"),
    "doge": "a sequence changes in DogeForCausalLM with those beside it",
    "nemotron": "is not told which sequences are in a row",
}


def shared_by_two(path, neighbourhoods):
    """Log-probs of this rank's rows of each batch, and the gradients of the last; or why not."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # where a family's module is imported
            engine = make_engine(path, **shared(2))
    except ConfigError as exc:
        return str(exc)
    found = [engine.compute_log_prob(own_rows(data), temperature=1.0, limits=WHOLE)[0] for data in neighbourhoods]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nothing is done in place to what it returns
        return found, cases.gradients(engine, own_rows(neighbourhoods[-1]))


@pytest.mark.cells(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_family_of_models_is_what_transformers_computes_when_ranks_share_sequences_or_refused(
    ranks, tmp_path, record_property, name
):
    """Windows are shorter than the sequences of the batch. scripts/models_page.py makes a column of this."""
    if name in REFUSED:
        record_property("refused", REFUSED[name])
    assert_right_or_refused(ranks, ARCHITECTURES[name], tmp_path, REFUSED.get(name))


SEEN_IN_PART_REFUSED = {
    "deepseek_v32 with ties": INDEXED,
    "longrope with scales": LONGEST,
    "by kinds of layers": LONGEST,
    "zamba2 with shared attention": STATES,
    "doge": "a sequence changes in DogeForCausalLM with its place in a row",
}


@pytest.mark.cells(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_models_that_see_some_of_their_tokens_are_shared_as_transformers_computes_them_or_refused(
    ranks, tmp_path, name
):
    assert_right_or_refused(ranks, VARIANTS[name], tmp_path, SEEN_IN_PART_REFUSED.get(name))


def assert_right_or_refused(ranks, tried, path, refusal):
    write_checkpoint(tried, path)
    data = cases.padded_batch()
    neighbourhoods = [data[[2, 0, 3, 1]], cases.placed(data, [2, 0, 3, 1], cases.OFFSETS[1])[0], data]
    outcomes = ranks.run(shared_by_two, 2, path, neighbourhoods)
    if refusal is not None:
        assert all(refusal in outcome for outcome in outcomes)
        return
    model = cases.reference(path)[0]
    for rows, *found in zip(neighbourhoods, *(log_probs for log_probs, _ in outcomes), strict=True):
        torch.testing.assert_close(torch.cat(found), cases.reference_log_probs(model, rows), rtol=0, atol=1e-4)
    expected = cases.reference_gradients(model, data)
    assert [cases.other_gradients(found, expected) for _, found in outcomes] == [{}, {}]


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("llama", {"num_attention_heads": 3}, "2 ranks cannot share the 3 attention heads of the model LlamaForCausal"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "stretches positions as the largest one in a call asks (rope_type=longrope)",
        ),
    ],
)
def test_what_a_config_says_against_sharing_is_told_without_weights(name, changes, problem):
    config = ARCHITECTURES[name].make_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for key, value in changes.items():
        setattr(model.config, key, value)
    assert problem in why_not_shared(model, 2)
