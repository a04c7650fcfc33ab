from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.workers.engine.engine_cases import (
    WEIGHTS_CHANGE_ONCE_ASKED,
    assemble,
    assert_same_weights,
    batch,
    decay_of,
    held_parts,
    make_engine,
    reference_log_probs,
    reference_steps,
    weighted_loss,
    weights_during_a_step,
)
from tests.workers.engine.megatron_cases import (
    CONTENTS,
    EP2,
    PP2,
    RATES,
    SEQUENCE,
    SMALL,
    TP2,
    WHOLE_EXPERTS,
    as_in_the_file,
    make_megatron,
    own_rows,
    read_from_megatron,
    resumed,
    rounded_log_probs,
    tiny_moe,
    train,
    whole_life,
    written_by_megatron,
)
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.engine.megatron.layout import divide
from verl.workers.losses import get_policy_loss_fn

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EMBEDDING = {"account_for_embedding_in_pipeline_split": True}
LOSS = {"account_for_loss_in_pipeline_split": True}
LAYOUTS = [
    pytest.param("qwen2", True, 2, TP2, id="two tensor-parallel ranks"),
    pytest.param("qwen3", True, 2, PP2, id="two stages with tied embeddings"),
    pytest.param("llama", False, 3, {"pipeline_model_parallel_size": 3} | EMBEDDING, id="the first stage has no layer"),
    pytest.param(
        "qwen3", True, 4, {"pipeline_model_parallel_size": 4} | EMBEDDING | LOSS, id="both ends have no layer"
    ),
    pytest.param(
        "llama", False, 4, TP2 | PP2 | SEQUENCE | {"recompute": True}, id="two stages of two ranks, recomputed"
    ),
    pytest.param(
        "qwen2",
        True,
        2,
        TP2 | {"override_transformer_config": RECOMPUTE},
        id="two ranks, with fields of Megatron",
    ),
    pytest.param("qwen3_moe", False, 2, EP2, id="experts dealt out to two ranks"),
    pytest.param("qwen3_moe", False, 4, EP2, id="experts dealt out to two ranks, twice"),
    pytest.param("qwen3_moe", False, 2, TP2 | SEQUENCE | EP2 | WHOLE_EXPERTS, id="the same two share the rest"),
]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return tiny_moe(tmp_path_factory.mktemp("moe") / "model")


def same_bits(found: list[tuple], expected: list[tuple]) -> bool:
    return all(torch.equal(old[2], new[2]) for old, new in zip(found, expected, strict=True))


@pytest.mark.parametrize(("architecture", "tied", "world_size", "options"), LAYOUTS)
def test_a_layout_computes_trains_exports_and_resumes_as_one_process_does(
    ranks, models, moe, tmp_path, architecture, tied, world_size, options
):
    path = moe if architecture == "qwen3_moe" else models(architecture, tied)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        expected = reference_log_probs(model, batch(12), 0.7)
    loss, norm, weights = reference_steps(
        path, [batch(12, seed) for seed in range(3)], temperature=0.7, grad_clip=0.5, rates=RATES
    )
    life = ranks.run(whole_life, world_size, path, options, tmp_path)

    for place in (0, 1):
        torch.testing.assert_close(torch.cat([rank["log_probs"][place] for rank in life]), expected[place])
    for rank in life:
        assert rank["metrics"]["loss"] == pytest.approx(loss, rel=1e-4)
        assert rank["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert rank["metrics"]["tokens"] == pytest.approx(1.0)
        assert rank["metrics"] == life[0]["metrics"]
        assert rank["specs"] == life[0]["specs"]
        assert rank["collectives"] == 0, "the weight source communicated"
    trained = assemble([rank["trained"] for rank in life])
    assert_same_weights(trained, as_in_the_file(weights))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(
        torch.equal(value, trained[name]) for name, value in as_in_the_file(dict(loaded.named_parameters())).items()
    )

    again = ranks.run(resumed, world_size, path, options, tmp_path)
    for rank, other in zip(life, again, strict=True):
        assert same_bits(other["saved"], rank["saved"])
        assert same_bits(other["trained"], rank["trained"])
        assert torch.equal(other["drawn"], rank["drawn"])
        assert other["metrics"] == rank["metrics"]


def trained_without_decay_of_vectors(path):
    engine = make_megatron(path, TP2, weight_decay=2.0, decay_norms_and_biases=False)
    train(engine, (0, 1))
    return held_parts(engine)


def test_norms_and_biases_decay_only_where_that_is_asked_for(ranks, models):
    path, seeds = models("qwen2", True), (0, 1)
    _, _, weights = reference_steps(
        path,
        [batch(12, seed) for seed in seeds],
        temperature=0.7,
        grad_clip=0.5,
        rates=RATES[: len(seeds)],
        decay=decay_of,
    )
    parts = ranks.run(trained_without_decay_of_vectors, 2, path)
    assert_same_weights(assemble(parts), as_in_the_file(weights))


def held_moments(path, options, directory):
    """Elements of the moments that a rank keeps, before and after a step, and what it holds after three."""
    engine = make_megatron(path, options)
    counts = []
    for seed in range(3):
        kept = engine._optimizer.moments()
        counts.append({kind: sum(tensor.numel() for tensor in own.values()) for kind, own in kept.items()})
        train(engine, (seed,))
    engine.save_checkpoint(directory / "step", CONTENTS)
    return counts, sum(tensor.numel() for tensor in engine._built_model.weights.tensors.values()), held_parts(engine)


def test_data_parallel_ranks_divide_the_moments_and_train_as_if_each_kept_all(ranks, models, tmp_path):
    path = models("qwen3", True)
    shared, whole = (
        ranks.run(held_moments, 2, path, {"use_distributed_optimizer": value}, tmp_path / str(value))
        for value in (True, False)
    )
    numel = shared[0][1]
    for counts in zip(*(counts for counts, _, _ in shared), strict=True):
        for kind in ("exp_avg", "exp_avg_sq"):
            kept = [count[kind] for count in counts]
            assert sum(kept) == numel
            assert max(kept) < 0.6 * numel
    assert {count["exp_avg"] for counts, _, _ in whole for count in counts} == {numel}
    found, expected = (assemble([parts for _, _, parts in result]) for result in (shared, whole))
    assert_same_weights(found, expected)

    from_shared, from_whole = (
        assemble([rank["trained"] for rank in ranks.run(resumed, 2, path, options, tmp_path / saved)])
        for saved, options in (("True", {"use_distributed_optimizer": False}), ("False", {}))
    )
    assert_same_weights(from_shared, from_whole)


def test_moments_are_divided_evenly_and_the_first_tensor_has_the_first_rank():
    assert divide([8, 5, 4, 2, 1], 2) == [0, 1, 1, 0, 1]
    assert divide([3, 3], 4) == [0, 1]
    assert divide([], 2) == []


def copies_of_tied_embeddings(path):
    engine = make_megatron(path, PP2)
    train(engine, range(3))
    return {
        name: value.detach().clone()
        for name, value in engine.model.named_parameters()
        if name in ("embedding.word_embeddings.weight", "output_layer.weight")
    }


def test_both_ends_of_the_pipeline_keep_the_same_tied_embeddings(ranks, models):
    """Either copy may be sent to the rollouts."""
    first, other, *last = ranks.run(copies_of_tied_embeddings, 4, models("qwen2", True))
    for embedding in (first, other):
        for head in last:
            assert torch.equal(embedding["embedding.word_embeddings.weight"], head["output_layer.weight"])


def test_another_layout_goes_on_from_a_checkpoint(ranks, models, tmp_path):
    path = models("qwen3")
    life = ranks.run(whole_life, 2, path, TP2, tmp_path)
    again = ranks.run(resumed, 4, path, PP2, tmp_path)
    for part in ("saved", "trained"):
        found, expected = (assemble([rank[part] for rank in result]) for result in (again, life))
        assert_same_weights(found, expected)


@pytest.mark.parametrize(
    ("architecture", "tied", "writes", "reads"),
    [("qwen2", True, (1, {}), (2, TP2)), ("llama", False, (2, TP2), (2, PP2)), ("qwen3_moe", False, (2, EP2), (1, {}))],
)
def test_the_first_weights_are_those_of_megatrons_distributed_checkpoint_in_any_layout(
    ranks, models, moe, tmp_path, architecture, tied, writes, reads
):
    path = moe if architecture == "qwen3_moe" else models(architecture, tied)
    written = ranks.run(written_by_megatron, writes[0], path, writes[1], tmp_path / "dist")
    read = ranks.run(read_from_megatron, reads[0], path, reads[1], tmp_path / "dist")
    assert_same_weights(assemble(read), assemble(written))


def log_probs_of_fsdp2(path):
    engine = make_engine(path, fsdp={"dtype": "bfloat16"})
    return engine.compute_log_prob(own_rows(batch(12)), temperature=1.0, limits=SMALL)[0]


def test_log_probs_in_bfloat16_are_those_of_fsdp2_within_its_rounding(ranks, models):
    path = models("qwen3", True)
    found = torch.cat(ranks.run(rounded_log_probs, 2, path, TP2))
    torch.testing.assert_close(found, torch.cat(ranks.run(log_probs_of_fsdp2, 2, path)), atol=0.05, rtol=0.0)


def weights_during_a_step_of(path, layout):
    return weights_during_a_step(make_megatron(path, layout), own_rows(batch(8)), SMALL)


@pytest.mark.parametrize("layout", [TP2, PP2 | {"dtype": "bfloat16"}])
def test_weights_may_be_copied_until_the_engine_asks_to_change_them(ranks, models, layout):
    for changed in ranks.run(weights_during_a_step_of, 2, models("qwen2"), layout):
        assert changed == WEIGHTS_CHANGE_ONCE_ASKED


def train_on_nan(path):
    def broken(log_prob, entropy, micro_batch, totals):
        loss, metrics = weighted_loss(log_prob, entropy, micro_batch, totals)
        return loss * float("nan"), metrics

    engine = make_megatron(path, TP2 | {"dtype": "bfloat16"})
    before = [(name, box, values.clone()) for name, box, values in held_parts(engine)]
    bad = engine.train_mini_batch(own_rows(batch(4)), broken, temperature=1.0, limits=SMALL)
    between = held_parts(engine)
    good = engine.train_mini_batch(own_rows(batch(4)), weighted_loss, temperature=1.0, limits=SMALL)
    source_is_model = all(
        torch.equal(weight.to(parameter.dtype), parameter)
        for weight, parameter in zip(
            engine._built_model.weights.tensors.values(), engine.model.parameters(), strict=True
        )
    )
    return same_bits(before, between), bad, good, same_bits(between, held_parts(engine)), source_is_model


def test_a_gradient_that_is_not_finite_skips_the_step_and_the_next_one_works(ranks, models):
    for unchanged, bad, good, stuck, source_is_model in ranks.run(train_on_nan, 2, models("qwen2")):
        assert unchanged
        assert bad["skipped_steps"] == 1.0
        assert good["skipped_steps"] == 0.0
        assert not stuck
        assert source_is_model


HALF_AT_RANDOM = ActorConfig(policy_loss=PolicyLossConfig(clip_cov_lb=-1e9, clip_cov_ub=1e9, clip_cov_ratio=0.5))


def train_without_tokens_drawn(path):
    """What one step of Clip-Cov left out here, and this rank's copies of tensors that both tensor-parallel ranks have
    whole."""

    def loss_of(log_prob, entropy, micro_batch, totals):
        log_prob.register_hook(
            lambda gradient: left_out.append(micro_batch.batch["response_mask"].bool() & (gradient == 0))
        )
        return get_policy_loss_fn("clip_cov")(
            old_log_prob=log_prob.detach(),
            log_prob=log_prob,
            advantages=micro_batch.batch["advantages"],
            response_mask=micro_batch.batch["response_mask"],
            config=HALF_AT_RANDOM,
            totals=totals,
        )

    left_out = []
    torch.manual_seed(dist.get_rank())
    engine = make_megatron(path, TP2)
    engine.train_mini_batch(own_rows(batch(12)), loss_of, temperature=1.0, limits=SMALL)
    whole = {name: value.detach().clone() for name, value in engine.model.named_parameters() if "norm" in name}
    return left_out, whole, float(torch.rand(1))


def test_tensor_parallel_ranks_leave_out_the_same_tokens_where_a_loss_draws_them(ranks, models):
    results = ranks.run(train_without_tokens_drawn, 4, models("qwen2"))
    for first, other in (results[:2], results[2:]):
        assert len(first[0]) > 1
        assert all(torch.equal(*masks) for masks in zip(first[0], other[0], strict=True))
        assert any(mask.any() for mask in first[0])
    assert first[1]
    assert all(torch.equal(first[1][name], result[1][name]) for result in results for name in first[1])
    assert len({after for _, _, after in results}) == 4


def first_update(path, dropout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs before it and in it."""
    engine = make_megatron(path, {}, model={"dropout": dropout})
    data = batch(4)
    data.batch["row"] = torch.arange(4)
    before = engine.compute_log_prob(data, temperature=1.0, limits=SMALL)[0]
    during = torch.zeros_like(before)

    def loss(log_prob, entropy, micro_batch, totals):
        during[micro_batch.batch["row"]] = log_prob.detach()
        return log_prob.sum(), {}

    engine.train_mini_batch(data, loss, temperature=1.0, limits=SMALL)
    return before, during


def test_updates_drop_attention_only_where_dropout_is_kept(ranks, models, tmp_path):
    path = shutil.copytree(models("qwen2", True), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    ((before, during),) = ranks.run(first_update, 1, path, "off")
    assert during == pytest.approx(before, abs=1e-5)
    ((before, during),) = ranks.run(first_update, 1, path, "keep")
    assert (during - before).abs().max() > 1e-3
