"""Tool calls in texts of formats that verl knows: name and arguments are what verl finds, or a difference is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.originals.original import OURS, VERL, computed, differences
from verl.experimental.agent_loop.thinking import USUAL, Reasoning
from verl.utils.builtin.tokenizer import build_tokenizer

HERMES = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
IN_REASONING = [f"<think>{HERMES}</think>3", f"<think>{HERMES}", HERMES]
CALLS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": %s, "b": "%s"}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n<parameter=b>\n%s\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>%s</arg_value>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=add>\n<parameter=a>%s</parameter>\n<parameter=b>%s</parameter>\n</function>\n"
    "</seed:tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": %s, "b": "%s"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">%s</parameter>\n'
    '<parameter name="b">%s</parameter>\n</invoke>\n</minimax:tool_call>',
}
"""By format of verl: how models write a call of `add`."""
MARKS = [
    *("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
]
TYPED = ("7", "[1] ")
"""The second is a text for the tool, and JSON, with a space behind it."""
VALUES = [("1", "two"), ("-3", "a b"), ("10", "x < y & z"), ("7", "\u00e9t\u00e9")]


def texts(call: str) -> list[str]:
    """A message around calls: none, one after text, each of the values, two."""
    made = [call % values for values in VALUES]
    return ["Nothing to call.", f"Let me see. {made[0]}", *made[1:], made[0] + "\n" + made[1]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the marks of all formats as tokens, as their models have them."""
    directory, made = tmp_path_factory.mktemp("tokenizer"), build_tokenizer(256)
    made.add_tokens(MARKS)
    made.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def found(tokenizer: Path) -> tuple[list[tuple[str, str]], Any, Any]:
    """Formats and texts, what verl finds, and we."""
    tried = [("hermes", text) for text in IN_REASONING]
    tried += [(name, text) for name, call in CALLS.items() for text in [*texts(call), call % TYPED]]
    given = {"tokenizer": str(tokenizer), "texts": tried}
    verls = computed("find_calls.py", {**given, "formats": None}, VERL)
    return tried, verls, computed("find_calls.py", {**given, "formats": [*verls["formats"], "none"]}, OURS)


@pytest.fixture(scope="module")
def both(found: tuple[list[tuple[str, str]], Any, Any]) -> list[tuple[str, str, Any, Any]]:
    """Format, text, verl's calls, ours."""
    tried, verls, ours = found
    calls = zip(tried, verls["calls"], ours["calls"], strict=True)
    return [(name, text, *both) for (name, text), *both in calls]


def test_every_format_that_verl_has_registered_is_taken(found: tuple[list[tuple[str, str]], Any, Any]) -> None:
    _, verls, ours = found
    assert verls["formats"].keys() >= CALLS.keys()
    refused = {name: said for name, said in ours["formats"].items() if said}
    assert refused.keys() == {"none"}
    assert "none" in refused["none"]


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_format_are_those_that_verl_finds(both: list[tuple[str, str, Any, Any]], name: str) -> None:
    apart = {*IN_REASONING, CALLS[name] % TYPED}
    found = [(verls, ours) for kind, text, verls, ours in both if kind == name and text not in apart]
    assert [ours for _, ours in found] == [verls for verls, _ in found]
    assert [verls for verls, _ in found][1:3] == [[["add", {"a": 1, "b": "two"}]], [["add", {"a": -3, "b": "a b"}]]]


@pytest.mark.parametrize("name", CALLS)
def test_a_text_for_a_tool_is_the_text_that_was_written(both: list[tuple[str, str, Any, Any]], name: str) -> None:
    assert differences()["texts among the arguments of calls in XML"]["why"]
    [(verls, ours)] = [(verls, ours) for kind, text, verls, ours in both if text == CALLS[name] % TYPED]
    assert ours == [["add", {"a": 7, "b": "[1] "}]]
    in_xml = name in ("glm", "seed", "minimax")
    assert verls == ([["add", {"a": 7, "b": [1]}]] if in_xml else ours)


def test_verl_finds_calls_in_the_reasoning_and_the_difference_is_listed(both: list[tuple[str, str, Any, Any]]) -> None:
    ours = []
    for text in IN_REASONING:
        said = text
        for start, end in reversed(Reasoning((USUAL,)).spans(text)):
            said = said[:start] + said[end:]
        ours.append(said.count("<tool_call>"))
    verls = [len(calls) for _, text, calls, _ in both if text in IN_REASONING]
    assert (verls, ours) == ([1, 1, 1], [0, 0, 1])
    assert "tool calls inside of the reasoning" in differences()
