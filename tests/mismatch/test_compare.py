"""How far from rounding a difference is, and what the command line refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch

from verl.cli.main import main
from verl.mismatch.causes import Cause
from verl.mismatch.compare import BEYOND, Place, excess
from verl.mismatch.findings import Findings, Token, another_trainer
from verl.mismatch.page import html, table
from verl.mismatch.places import modules_of, states_in, states_out, tokens_first


@pytest.fixture
def rounded():
    wide = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    return wide.bfloat16(), wide


def test_a_place_of_an_engine_is_a_module_of_transformers():
    layer = torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2), "rotary_emb": torch.nn.Identity()})
    inner = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer]), "norm": torch.nn.Identity()})
    assert list(modules_of(torch.nn.ModuleDict({"model": inner}))) == ["layers.0", "layers.0.mlp", "norm"]


def test_states_are_the_first_two_of_one_shape_and_positions_are_none():
    positions, states = torch.arange(3), torch.zeros(3, 4)
    assert len(states_in((positions, states), {"residual": states + 1})) == 2
    assert len(states_in((positions,), {"hidden_states": states, "residual": None})) == 1
    assert len(states_out((states, torch.zeros(3, 9)))) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--top-p", "1.5"], "--top-p must be above 0 and at most 1"),
        (["--top-k", "0"], "--top-k must be 1 or more"),
        (["--tolerance", "nan"], "--tolerance must be 0 or more"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size must be 1 or more"),
        (["--engine", "sglang", "--exact"], "--exact needs --engine vllm"),
        (["--engine", "sglang", "--tensor-parallel-size", "2"], "an engine of one rank"),
        (["--json", "/nowhere/found.json"], "there is no directory /nowhere"),
        (["--data", "/nowhere.jsonl"], "--data /nowhere.jsonl"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, words, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    _refused(["--model", str(tmp_path), *arguments], words, capsys)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is no JSON"),
        ("[1]", "line 1 is no JSON"),
        ("{}", "prompt_ids"),
        ('{"prompt_ids": ["a"]}', "line 1"),
    ],
)
def test_a_line_of_data_that_is_no_sequence_is_named(line, words, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text(line + "\n")
    _refused(["--model", str(tmp_path), "--data", str(tmp_path / "data.jsonl")], words, capsys)


def test_a_directory_that_is_no_model_is_one_line(tmp_path, capsys):
    _refused(["--model", str(tmp_path)], "there is no config.json", capsys)


def _refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["mismatch", *arguments])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_rounding_is_not_beyond_and_one_wrong_channel_is(rounded):
    own, wide = rounded
    other = (wide * (1 + 2**-10)).bfloat16()  # rounds some elements the other way
    assert excess(other, own, wide) < BEYOND
    wrong = own.clone()
    wrong[:, 7] *= 1.1
    assert excess(wrong, own, wide) > BEYOND
    wrong = own.clone()
    wrong[3] *= 1.1  # one token
    assert excess(wrong, own, wide) > BEYOND
    assert excess(own * float("nan"), own, wide) == float("inf")


def test_findings_are_plain_json_and_a_page_without_markup_of_others(rounded):
    token = Token(sequence=0, index=3, token=5, engine=0.5, trainer=0.25, why="rounding")
    found = Findings(
        model="<b>",
        architecture="A",
        engine="vllm",
        dtype="bfloat16",
        tensor_parallel_size=1,
        causes=[],
        places=[Place(name="layers.0", excess={"decode": 1.0}, relative=0.1)],
        tokens=[token],
    )
    assert json.loads(json.dumps(found.as_dict()))["rollout_probs_diff_mean"] == 0.25
    assert "<b>" not in html(found, 0.005)
    assert not found.passes(0.005)
    assert found.passes(0.25)
    assert "layers.0" in table(found, 0.005)
    found.causes.append(Cause(name="norm", place="norm", text="the scale differs"))
    assert not found.passes(0.25)
    assert table(found, 0.25).endswith("MISMATCH: norm")


def test_probabilities_that_a_runs_trainer_gave_are_held_against_those_of_transformers():
    tokens = [Token(sequence=0, index=2 + place, token=5, engine=0.5, trainer=0.5, why="") for place in range(3)]
    same = [math.log(0.5), None, math.log(0.5)]
    assert another_trainer(tokens, [2], [same]) == another_trainer(tokens, [2], [None]) == []
    assert another_trainer(tokens, [2], ()) == []
    (cause,) = another_trainer(tokens, [2], [[math.log(0.5), None, math.log(0.4)]])
    assert (cause.name, cause.text[:31]) == ("the run's trainer", "the run's trainer gave 2 tokens")


@pytest.mark.parametrize(("tokens", "heads"), [(1, 4), (3, 4), (4, 4), (5, 4)])
def test_queries_are_brought_into_the_order_of_tokens_whichever_comes_first(tokens, heads):
    states = torch.arange(tokens * heads * 2).reshape(1, tokens, heads, 2)
    assert torch.equal(tokens_first(states, tokens), states)
    assert torch.equal(tokens_first(states.transpose(1, 2), tokens), states)


def test_a_shared_expert_that_vllm_multiplies_with_its_gate_is_not_compared_by_itself():
    block = torch.nn.ModuleDict({"shared_expert": torch.nn.Linear(2, 2), "gate": torch.nn.Linear(2, 2)})
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": block})])
    assert "layers.0.mlp.shared_expert" in modules_of(model)
    block["shared_expert"].expert_gate = block["gate"]
    assert "layers.0.mlp.shared_expert" not in modules_of(model)
    assert "layers.0.mlp.gate" in modules_of(model)
