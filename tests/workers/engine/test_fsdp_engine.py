from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.workers.engine.engine_cases import (
    WEIGHTS_CHANGE_ONCE_ASKED,
    assemble,
    assert_same_weights,
    batch,
    decay_of,
    held_parts,
    make_engine,
    own_rows,
    reference_log_probs,
    reference_steps,
    train,
    weighted_loss,
    weights_during_a_step,
)
from verl.checkpoint_engine.errors import PlanError
from verl.utils.config import ConfigError
from verl.workers.engine.micro_batches import MicroBatchLimits

SMALL = MicroBatchLimits(max_tokens=24)
WHOLE = MicroBatchLimits(max_sequences=100)
PACKED = {"use_remove_padding": True}
FSDP1 = {"strategy": "fsdp"}
GATHERED = {"reshard_after_forward": False, "forward_prefetch": True}
RECOMPUTED = {"model": {"enable_gradient_checkpointing": True}, "fsdp": {"optimizer_offload": True}}


def log_probs(path, data, limits, strategy="fsdp2", fsdp=None):
    engine = make_engine(path, strategy=strategy, fsdp=fsdp or {})
    return engine.compute_log_prob(own_rows(data), temperature=0.7, limits=limits, calculate_entropy=True)


@pytest.mark.parametrize(
    ("architecture", "tied", "strategy"),
    [
        ("qwen2", True, "fsdp2"),
        ("qwen3", False, "fsdp2"),
        ("llama", False, "fsdp2"),
        ("qwen2", True, "fsdp"),
        ("qwen3", False, "fsdp"),
        ("qwen3_moe", False, "fsdp2"),
    ],
)
def test_log_probs_and_entropies_equal_those_of_each_sequence_alone_and_keep_their_order(
    ranks, models, architecture, tied, strategy
):
    path, data = models(architecture, tied), batch(8)
    with torch.no_grad():
        expected = reference_log_probs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), data, 0.7)
    results = ranks.run(log_probs, 2, path, data, SMALL, strategy)
    for place in (0, 1):
        torch.testing.assert_close(torch.cat([result[place] for result in results]), expected[place])


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp2", 1), ("fsdp", 1), ("fsdp", 2)])
def test_half_precision_computes_from_full_precision_parameters(ranks, models, strategy, world_size):
    path, data = models("qwen2"), batch(4)
    exact, _ = ranks.run(log_probs, world_size, path, data, WHOLE, strategy)[0]
    rough, _ = ranks.run(log_probs, world_size, path, data, WHOLE, strategy, {"dtype": "bfloat16"})[0]
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, atol=0.05, rtol=0.0)


@pytest.mark.parametrize(
    ("architecture", "tied", "world_size", "limits", "options"),
    [
        pytest.param("qwen2", True, 1, WHOLE, {}, id="one rank, one micro-batch"),
        pytest.param("qwen2", True, 2, MicroBatchLimits(max_sequences=1), {}, id="micro-batches of one sequence"),
        pytest.param("qwen2", False, 2, SMALL, {}, id="dynamic micro-batches"),
        pytest.param("qwen3", False, 3, SMALL, {}, id="rows that three ranks cannot share evenly"),
        pytest.param("llama", True, 2, SMALL, {"fsdp": {"fsdp_size": 1}}, id="replicated shards"),
        pytest.param("llama", False, 2, SMALL, {"fsdp": {"reshard_after_forward": False}}, id="kept gathered"),
        pytest.param("llama", False, 2, SMALL, {"fsdp": {"forward_prefetch": True}}, id="prefetched"),
        pytest.param("qwen2", True, 2, SMALL, {"model": {"enable_gradient_checkpointing": True}}, id="recomputed"),
        pytest.param("qwen2", True, 2, SMALL, {"model": PACKED}, id="packed"),
        pytest.param("qwen3_moe", False, 2, SMALL, {"model": PACKED}, id="experts of packed sequences"),
        pytest.param("llama", False, 2, SMALL, FSDP1 | {"model": PACKED}, id="fsdp1: packed"),
        pytest.param(
            "qwen2",
            True,
            2,
            WHOLE,
            {"model": PACKED | {"enable_gradient_checkpointing": True}},
            id="packed and recomputed",
        ),
        pytest.param("qwen2", True, 2, SMALL, {"fsdp": {"optimizer_offload": True}}, id="offloaded optimizer"),
        pytest.param("qwen3_moe", False, 3, SMALL, {}, id="experts that three ranks cannot share evenly"),
        pytest.param("qwen3_moe", False, 2, SMALL, FSDP1, id="fsdp1: experts"),
        pytest.param("qwen2", True, 1, WHOLE, FSDP1, id="fsdp1: one rank"),
        pytest.param("qwen2", True, 2, MicroBatchLimits(max_sequences=1), FSDP1, id="fsdp1: single sequences"),
        pytest.param("qwen3", False, 3, SMALL, FSDP1, id="fsdp1: ranges that end inside a row"),
        pytest.param("llama", True, 2, SMALL, FSDP1 | {"fsdp": {"fsdp_size": 1}}, id="fsdp1: replicated"),
        pytest.param("llama", False, 2, SMALL, FSDP1 | {"fsdp": GATHERED}, id="fsdp1: kept gathered, prefetched"),
        pytest.param("qwen2", True, 2, SMALL, FSDP1 | RECOMPUTED, id="fsdp1: recomputed, offloaded optimizer"),
    ],
)
def test_steps_equal_those_of_one_process_that_sees_the_whole_mini_batch(
    ranks, models, architecture, tied, world_size, limits, options
):
    path, data = models(architecture, tied), batch(12)
    loss, norm, weights = reference_steps(path, [data, data], temperature=0.7, grad_clip=0.5)
    results = ranks.run(train, world_size, path, data, limits, options, 2)
    for metrics, _ in results:
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["tokens"] == pytest.approx(1.0)
        assert metrics["skipped_steps"] == 0.0
    assert_same_weights(assemble([parts for _, parts in results]), weights)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_norms_and_biases_decay_only_where_that_is_asked_for(ranks, models, strategy):
    path, data = models("qwen2"), batch(12)
    for spares in (False, True):
        optim = {"weight_decay": 2.0, "decay_norms_and_biases": not spares}
        decay = partial(decay_of, spares=spares)
        _, _, weights = reference_steps(path, [data, data], temperature=0.7, grad_clip=0.5, decay=decay)
        results = ranks.run(train, 2, path, data, SMALL, {"strategy": strategy, "optim": optim}, 2)
        assert_same_weights(assemble([parts for _, parts in results]), weights)


def weights_during_a_step_of(path, options):
    return weights_during_a_step(make_engine(path, **options), own_rows(batch(8)), SMALL)


@pytest.mark.parametrize("options", [{}, {"fsdp": GATHERED}, FSDP1, FSDP1 | {"fsdp": GATHERED}])
def test_weights_may_be_copied_until_the_engine_asks_to_change_them(ranks, models, options):
    for changed in ranks.run(weights_during_a_step_of, 2, models("qwen2"), options):
        assert changed == WEIGHTS_CHANGE_ONCE_ASKED


def train_on_unequal_lengths(path):
    """Within the token budget rank 0 needs four micro-batches and rank 1 one."""
    data = batch(8)
    data.batch["response_mask"][4:, 1:] = 0
    data.batch["attention_mask"][4:, 8:] = 0
    data.batch["attention_mask"][4:, :6] = 0
    engine = make_engine(path)
    limits = MicroBatchLimits(max_tokens=12)
    rows = own_rows(data)
    passes = len(engine._micro_batches(rows, limits))
    return passes, engine.train_mini_batch(rows, weighted_loss, temperature=1.0, limits=limits)["loss"]


def test_ranks_with_sequences_of_different_length_make_the_same_number_of_passes(ranks, models):
    results = ranks.run(train_on_unequal_lengths, 2, models("qwen2"))
    assert results[0] == results[1]
    assert results[0][0] > 1


def train_on_nan(path, strategy):
    def broken(log_prob, entropy, micro_batch, totals):
        loss, metrics = weighted_loss(log_prob, entropy, micro_batch, totals)
        return loss * (float("nan") if dist.get_rank() == 0 else 1.0), metrics

    engine = make_engine(path, strategy=strategy)
    before = held_parts(engine)
    bad = engine.train_mini_batch(own_rows(batch(4)), broken, temperature=1.0, limits=WHOLE)
    between = held_parts(engine)
    good = engine.train_mini_batch(own_rows(batch(4)), weighted_loss, temperature=1.0, limits=WHOLE)
    return before, bad, between, good


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all_and_the_next_one_works(
    ranks, models, strategy
):
    for before, bad, between, good in ranks.run(train_on_nan, 2, models("qwen2"), strategy):
        assert bad["skipped_steps"] == 1.0
        assert all(torch.equal(old[2], new[2]) for old, new in zip(before, between, strict=True))
        assert good["skipped_steps"] == 0.0


def rates(path):
    engine = make_engine(path, optim={"lr": 1.0, "lr_warmup_steps": 2})
    used = []
    for _ in range(3):
        engine.train_mini_batch(own_rows(batch(2)), weighted_loss, temperature=1.0, limits=WHOLE)
        assert engine.optimizer is not None
        used.append((engine.optimizer.param_groups[0]["lr"], engine.step_lr()))
    return used


def test_the_optimizer_uses_the_rate_of_the_training_step(ranks, models):
    assert ranks.run(rates, 1, models("qwen2"))[0] == [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)]


def build_error(path, model=None, fsdp=None):
    try:
        make_engine(path, model=model or {}, fsdp=fsdp or {})
    except (PlanError, ConfigError) as exc:
        return type(exc).__name__, str(exc)
    return None


def broken_copy(source, directory, edit):
    """The model at `source` with `edit` applied to its tensors."""
    directory.mkdir()
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text((source / "config.json").read_text())
    return directory


def test_tensors_that_the_checkpoint_lacks_or_has_too_many_are_all_named(ranks, models, tmp_path):
    def edit(tensors):
        tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
        del tensors["lm_head.weight"]

    kind, message = ranks.run(build_error, 1, broken_copy(models("qwen2"), tmp_path / "model", edit))[0]
    assert kind == "PlanError"
    for name in ("model.norm.weight", "lm_head.weight", "model.extra.weight"):
        assert name in message


def test_an_expert_that_the_checkpoint_lacks_is_named(ranks, models, tmp_path):
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    kind, message = ranks.run(
        build_error, 1, broken_copy(models("qwen3_moe"), tmp_path / "model", lambda t: t.pop(name))
    )[0]
    assert kind == "PlanError"
    assert f"in the model only: {name};" in message


def test_a_tensor_of_another_shape_is_named_with_both_shapes(ranks, models, tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    kind, message = ranks.run(build_error, 1, broken_copy(models("qwen2"), tmp_path / "model", edit))[0]
    assert kind == "PlanError"
    assert "model.norm.weight" in message
    assert "(16,)" in message
    assert "(15,)" in message


def test_a_tied_head_that_the_checkpoint_repeats_is_accepted(ranks, models, tmp_path):
    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert ranks.run(build_error, 1, broken_copy(models("qwen2", True), tmp_path / "model", edit)) == [None]


def test_what_the_user_wrote_wrong_is_said(ranks, models, tmp_path):
    path = models("qwen2")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert "model.safetensors" in ranks.run(build_error, 1, tmp_path)[0][1]
    assert "config.json" in ranks.run(build_error, 1, tmp_path / "absent")[0][1]
    misspelt = ranks.run(build_error, 1, path, {"override_config": {"rope_thetta": 1}})[0][1]
    assert "override_config.rope_thetta" in misspelt
    assert "fsdp_size=3" in ranks.run(build_error, 2, path, None, {"fsdp_size": 3})[0][1]
