"""Calls of tools inside of a model's reasoning are not made, whatever the format."""

from __future__ import annotations

import pytest

from tests.experimental.agent_loop.templates import FAMILIES, tokenizer_of
from tests.experimental.agent_loop.test_tool_loop import CALL, config, run  # noqa: F401 - a fixture
from tests.experimental.agent_loop.test_tool_parser import Brackets  # noqa: F401 - registers a format
from verl.experimental.agent_loop.thinking import KNOWN, USUAL, Reasoning, outside

IN_BRACKETS = '[[add {"a": 1, "b": 2}]]'
FORMATS = {"hermes": CALL, "brackets": IN_BRACKETS}


@pytest.fixture
def tokenizer():
    """Of a model whose template opens no reasoning."""
    return tokenizer_of(FAMILIES["hermes"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("<think>I could {}</think>3", 0),
        ("<think>I could {}", 0),
        ("I could {}</think>3", 0),
        ("<think>\U0001f600 {}</think>{}", 1),
        ("<think>a</think>\u20ac{}<think>b {}</think>", 1),
        ("<think>a</think>b<think>{}", 0),
        ("<think></think>{}", 1),
        ("{}", 1),
    ],
)
def test_a_call_inside_of_the_reasoning_is_not_executed(config, tokenizer, form, said, calls):  # noqa: F811
    output, _ = run(config(f"format={form}"), tokenizer, said.replace("{}", FORMATS[form]), "3")
    assert output.metrics["tool_calls"] == calls


def test_it_is_executed_if_the_user_wants_it(config, tokenizer):  # noqa: F811
    said = f"<think>I could {CALL}</think>"
    output, _ = run(config("ignore_calls_in_thinking=false"), tokenizer, said, "3")
    assert output.metrics["tool_calls"] == 1


def test_a_template_that_opens_the_reasoning_itself_is_followed(config, tokenizer):  # noqa: F811
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{{ '<|im_end|>\n' }}{% endfor %}<think>\n"
    )
    reasoning = Reasoning.of(tokenizer)
    prompt = tokenizer.encode("1+2?<|im_end|>\n<think>\n")
    for said, left in ((CALL, ""), (f"{CALL}</think>{CALL}", CALL), (f"Hm.</think>{CALL}<think>{CALL}", CALL)):
        kept = outside(tokenizer.encode(said), prompt, reasoning, tokenizer.decode)
        assert tokenizer.decode(kept) == left


@pytest.mark.parametrize("pair", [USUAL, *KNOWN])
def test_marks_of_other_models_count_where_their_template_has_them(tokenizer, pair):
    start, end = pair
    text = f"a{start}b{end}c{start}d"
    tokenizer.chat_template = f"{{{{ '{start}' }}}}{{{{ '{end}' }}}}"
    assert [text[first:last] for first, last in Reasoning.of(tokenizer).spans(text)] == [f"{start}b{end}", f"{start}d"]
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert bool(Reasoning.of(tokenizer).spans(text)) == (pair == USUAL)


def test_a_message_without_reasoning_is_left_as_it_is(tokenizer):
    said = tokenizer.encode(f"\U0001f600 {CALL} \u20ac")
    assert outside(said, [], Reasoning.of(tokenizer), tokenizer.decode) == said
