"""What is named where a second model of transformers, with a fault, stands in for the engine."""

from __future__ import annotations

import pytest
import torch

from tests.mismatch.models import make
from verl.mismatch.causes import another_version, causes, not_exact
from verl.mismatch.compare import compared, not_compared, phases
from verl.mismatch.findings import differing
from verl.mismatch.places import IDS, LOG_PROBS, LOGITS, POSITIONS
from verl.mismatch.recording import Recording, Sampling
from verl.mismatch.trainer import TrainersModel

TOKENS, PROMPT = list(range(5, 45)), 9


def recording(engine: TrainersModel) -> Recording:
    values = engine.run(TOKENS)
    logits = values.pop(LOGITS).float()
    indices = range(PROMPT, len(TOKENS))
    scores = {
        LOGITS: {index: logits[index - 1] for index in indices},
        LOG_PROBS: {index: logits[index - 1].log_softmax(-1) for index in indices},
    }
    states = values | {IDS: torch.tensor(TOKENS), POSITIONS: torch.arange(len(TOKENS))}
    return Recording(tokens=[TOKENS], prompts=[PROMPT], states=[states], scores=[scores])


class Sides:
    def __init__(self, model, dtype="bfloat16"):
        self.engine, self.model, self.wide = (TrainersModel(model, dtype) for _ in range(3))
        self.wide.widen()

    def found(self, change=lambda recorded: None):
        engine = recording(self.engine)
        change(engine)
        both = phases({"decode": engine, "prefill": engine}, self.model, self.wide)
        places = compared(both)
        named = causes(both, places, {}, engine, Sampling(), self.model, self.wide)
        return named, places, differing(both, engine, Sampling(), bool(named))

    def first(self, change=lambda recorded: None):
        return [(cause.name, cause.place, cause.text) for cause in self.found(change)[0]][0]

    def after(self, place, change):
        self.engine.module(place).register_forward_hook(lambda module, given, states: change(states), prepend=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {family: make(tmp_path_factory.mktemp(family), family) for family in ("gemma2", "gemma3_text", "qwen3_moe")}


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3_moe"])
def test_the_same_model_differs_by_nothing(family, directories):
    named, places, tokens = Sides(directories[family]).found()
    assert named == not_exact(places) == []
    assert len(places) > 20
    assert {place.unequal for place in places} == {0.0}
    assert max(token.difference for token in tokens) < 1e-6
    assert len(tokens) == len(TOKENS) - PROMPT


def test_a_class_that_vllm_has_decorated_computes_as_before(directories, monkeypatch):
    model = TrainersModel(directories["gemma2"], "bfloat16")
    before = model.run(TOKENS)[LOGITS]

    def decorated(self, *arguments, **options):
        assert self.do_not_compile  # as in vLLM's, which raises without the attribute
        return self.forward(*arguments, **options)

    monkeypatch.setattr(type(model._model.base_model), "__call__", decorated)
    assert torch.equal(model.run(TOKENS)[LOGITS], before)


def test_another_activation_is_found_by_trying_it(directories):
    sides = Sides(directories["gemma3_text"])
    sides.engine.module("layers.1.mlp").act_fn = torch.nn.SiLU()
    assert sides.first() == ("activation", "layers.1.mlp.gated", "the engine's activation is silu")


def test_scores_that_are_not_capped_are_found_by_trying_it(directories):
    sides = Sides(directories["gemma2"])
    attention = sides.engine.module("layers.1.self_attn")
    attention.attn_logit_softcapping = None
    assert sides.first() == (
        "attention",
        "layers.1.self_attn.attention",
        "scores are not capped in the engine",
    )


def test_attention_is_named_alone_where_ranks_divide_what_is_behind_it(directories):
    sides = Sides(directories["qwen3_moe"])
    sides.engine.module("layers.1.self_attn").scaling *= 2**0.5

    def divided(recorded):
        for place in list(recorded.states[0]):
            if place.startswith(">") and place.endswith("o_proj"):
                del recorded.states[0][place]

    assert [cause.place for cause in sides.found(divided)[0]] == ["layers.1.self_attn.attention"]


def test_experts_in_each_others_place_are_found_by_trying_it(directories):
    sides = Sides(directories["qwen3_moe"])
    order = torch.tensor([0, 3, 2, 1])
    sides.engine.module("layers.1.mlp").experts.register_forward_pre_hook(
        lambda module, given: (given[0], order[given[1]], given[2])
    )
    assert sides.first() == ("experts", "layers.1.mlp", "experts 1 and 3 have each other's place")


def test_a_norm_of_queries_is_named_and_queries_after_it_are_not(directories):
    sides = Sides(directories["gemma3_text"])
    sides.after("layers.0.self_attn.q_norm", lambda states: states * 1.2)
    assert [cause.place for cause in sides.found()[0]] == ["layers.0.self_attn.q_norm"]


def test_a_router_with_a_narrow_weight_is_named_with_the_format(directories):
    sides = Sides(directories["qwen3_moe"])
    weight = sides.engine.module("layers.0.mlp.gate").weight
    with torch.no_grad():
        weight.copy_(weight.to(torch.float8_e4m3fn))
    assert sides.first() == (
        "precision of the router",
        "layers.0.mlp.gate",
        "the weight is computed with in float8 without a scale",
    )


def test_a_router_whose_scores_are_rounded_is_named_in_float32_too(directories):
    sides = Sides(directories["qwen3_moe"], "float32")
    assert sides.found()[0] == []
    sides.after("layers.0.mlp.gate", lambda scores: (scores[0].bfloat16().float(), *scores[1:]))
    assert sides.first() == ("precision of the router", "layers.0.mlp.gate", "the values are bfloat16")


def test_what_comes_before_a_norm_of_queries_is_compared_where_the_engine_fuses_it(directories):
    sides = Sides(directories["qwen3_moe"])
    sides.after("layers.0.self_attn.q_proj", lambda states: states.roll(1, -1))

    def fused(recorded):
        states = recorded.states[0]
        recorded.states = [{name: rows for name, rows in states.items() if not name.endswith("_proj")}]

    assert sides.first(fused) == (
        "projection",
        "layers.0.self_attn.q_norm.input",
        "what q_norm gets is computed differently",
    )


def test_a_score_that_is_changed_before_sampling_is_not_taken_for_a_temperature(directories):
    def biased(recorded):
        for log_probs in recorded.scores[0][LOG_PROBS].values():
            log_probs[50] += 2.0

    named, _, _ = Sides(directories["qwen3_moe"]).found(biased)
    assert [cause.text for cause in named] == [
        "scores are changed behind the head, that of token 50 by 2 more than others"
    ]


def test_probabilities_that_an_engine_gave_before_tell_another_version(directories):
    engine = recording(TrainersModel(directories["qwen3_moe"], "bfloat16"))
    before = [float(engine.scores[0][LOG_PROBS][index][TOKENS[index]]) for index in range(PROMPT, len(TOKENS))]
    assert another_version(engine, [before]) == another_version(engine, [None]) == another_version(engine, []) == []
    assert another_version(engine, [[0.0] * len(before)])[0].name == "another version"
    nearly = [[before[0] + 1e-7, *before[1:]]]
    assert another_version(engine, nearly) == another_version(engine, [before], exact=True) == []
    assert f"gave 1 of {len(before)} tokens" in another_version(engine, nearly, exact=True)[0].text


def test_places_that_an_engine_does_not_show_are_listed_and_a_model_without_blocks_is_refused(directories):
    sides = Sides(directories["qwen3_moe"])
    engine = recording(sides.engine)
    engine.states = [{name: rows for name, rows in engine.states[0].items() if "key" not in name}]
    both = phases({"decode": engine, "prefill": engine}, sides.model, sides.wide)
    assert not_compared(both) == ["self_attn.key"]
    engine.states = [{name: rows for name, rows in engine.states[0].items() if name != "layers.1"}]
    both = phases({"decode": engine, "prefill": engine}, sides.model, sides.wide)
    with pytest.raises(LookupError, match=r"no layers\.1 with the shape"):
        not_compared(both)
