"""What a vLLM worker need not load again, and that it computes with the version bit for bit all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.checkpoint_engine.kept_process import FLOAT8, REFRESHING, STEPS, Activated
from tests.float8 import FLOAT8_ON_CPU
from tests.warm_workers import WarmWorkers, written_by
from verl.checkpoint_engine.engines.vllm.unchanged import Kept, kept
from verl.utils.builtin import make_tiny_model

Steps = dict[str, dict[str, Activated]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What `kept_process` prints."""
    base = tmp_path_factory.mktemp("kept")
    models = [
        make_tiny_model(base / "llama", "llama"),
        make_tiny_model(base / "tied", "qwen2", tie_word_embeddings=True, dtype="bfloat16"),
        make_tiny_model(base / "experts", "qwen3_moe"),
    ]
    if FLOAT8_ON_CPU:
        models.append(make_tiny_model(base / FLOAT8, "qwen3_moe", hidden_size=256, dtype="bfloat16"))
    (base / "shm").mkdir()
    written = written_by(warm, "tests.checkpoint_engine.kept_process", base / "shm", *models)
    found, heads = json.loads(written.splitlines()[-1])
    return found, heads


@pytest.fixture(scope="module")
def activated(told: tuple[list[dict[str, Any]], dict[str, Any]]) -> Steps:
    """By model, then by step."""
    found: Steps = {}
    for one in told[0]:
        found.setdefault(one["model"], {})[one["step"]] = Activated(**one)
    return found


@pytest.mark.vllm
def test_a_tied_model_takes_a_head_that_is_its_embedding_and_no_other(told: tuple[Any, dict[str, Any]]):
    _, heads = told
    assert heads["equal"] == [None, 0]
    said, wrong = heads["other"]
    assert said.startswith("the engine computes with model.embed_tokens.weight in the place of lm_head.weight")
    assert wrong == 0  # nothing was loaded
    assert heads["equal, once"] == [None, None]
    assert heads["other, once"] == [said, None]
    assert heads["none, once"] == [None, None]
    assert "update again to compare" in heads["new, once"][0]
    assert heads["new, once more"] == [None, None]


@pytest.mark.vllm
def test_every_version_is_computed_with_bit_for_bit(activated: Steps):
    assert set(activated) == {"llama", "tied", "experts", REFRESHING, *([FLOAT8] if FLOAT8_ON_CPU else [])}
    for steps in activated.values():
        assert list(steps) == list(STEPS)
        assert {step: one.wrong for step, one in steps.items() if one.wrong} == {}


@pytest.mark.vllm
def test_layers_of_which_nothing_changed_are_not_loaded_again(activated: Steps):
    for name in activated.keys() - {REFRESHING}:
        found = {step: (one.kept, one.tensors) for step, one in activated[name].items()}
        kept_first, tensors = found["a projection and a norm"]
        # A fused projection is loaded whole: two neighbours of the one that changed, with their biases, go with it.
        assert kept_first == tensors - (7 if name == "tied" else 4)
        assert found["nothing"][0] == kept_first  # what was compared once, and nothing else
        assert 0 < found["one layer"][0] < kept_first
        assert found["one layer again"][0] == found["one layer"][0]


@pytest.mark.vllm
def test_everything_is_loaded_unless_the_caller_and_the_worker_name_the_same_version(activated: Steps):
    for steps in activated.values():
        assert steps["first"].kept == steps["everything"].kept == 0
        assert steps["one layer, after another version"].kept == 0
        assert steps["one layer, of an unknown version"].kept == 0


@pytest.mark.vllm
def test_a_model_that_looks_at_layers_while_it_is_loaded_is_noticed_and_loaded_whole(activated: Steps):
    assert {one.kept for one in activated[REFRESHING].values()} == {0}


@pytest.mark.vllm
def test_a_reload_leaves_nothing_behind_on_loaders(activated: Steps):
    assert {one.wrapped for steps in activated.values() for one in steps.values()} == {0}


def test_a_layer_is_kept_only_with_all_layers_that_its_tensors_fill():
    layers = {"qkv": {"q", "k", "v"}, "embed": {"e"}, "head": {"e", "b"}, "norm": {"n"}}
    assert kept(layers, {"q", "k", "e", "n"}) == Kept(frozenset({"norm"}), frozenset("n"))
    assert kept(layers, {"q", "k", "v", "e", "b"}) == Kept(frozenset({"qkv", "embed", "head"}), frozenset("qkveb"))
    assert kept(layers, set()) == Kept()
