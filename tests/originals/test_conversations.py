"""Conversations of agent loops against PyPI's verl: where a policy says the same, tokens, masks and positions are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.originals.conversations import both as said_by_both
from tests.originals.conversations import case
from tests.originals.original import differences
from verl.utils.builtin.tokenizer import END, build_tokenizer


def call(text: str, name: str = "echo") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"text": "{text}"}}}}</tool_call>'


CASES = {
    "no call": case(f"3{END}"),
    "one call": case(f"Hm. {call('3')}{END}", f"3{END}"),
    "two calls in two messages": case(f"{call('a')}{END}", f"{call('b')}{END}", f"ab{END}"),
    "two calls at once": case(f"{call('a')}{call('b')}{END}", f"ab{END}", multi_turn={"max_parallel_calls": 2}),
    "a call behind reasoning": case(f"<think>1</think>{call('a')}{END}", f"ab{END}"),
    "an empty answer": case(END),
    "an empty answer of a tool": case(f"{call('')}{END}", f"3{END}"),
    "too many messages": case(*[f"{call('a')}{END}"] * 3, multi_turn={"max_assistant_turns": 2}),
    "seven messages": case(*[f"{call('a')}{END}"] * 6, f"3{END}", lengths=(600, 2000)),
    "a message too long": case("x" * 500, lengths=(600, 40)),
    "a tool's answer too long for the rest": case(f"{call('x' * 60)}{END}", f"3{END}", lengths=(600, 120)),
    "the last message exactly fits": case("x" * 39 + END, lengths=(600, 40)),
    "unicode": case(f"{call('ü 𝄞 漢')}{END}", f"é{END}", prompt="ß 漢字?"),
    "a system message": case(
        f"3{END}", prompt=[{"role": "system", "content": "short"}, {"role": "user", "content": "1+2?"}]
    ),
    "a conversation": case(
        f"5{END}",
        prompt=[
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "+2?"},
        ],
    ),
    "one turn": case(f"3{END}", loop="single_turn_agent"),
    "one turn, too long": case("x" * 500, loop="single_turn_agent", lengths=(600, 40)),
    "one turn, nothing": case("", loop="single_turn_agent"),
    "one turn, an empty prompt": case(f"3{END}", loop="single_turn_agent", prompt=" "),
    "one turn, special tokens in a prompt": case(f"3{END}", loop="single_turn_agent", prompt=f"a{END}b<|user|>"),
    "a prompt that is cut": case(f"3{END}", loop="single_turn_agent", prompt="x" * 60, lengths=(40, 40)),
    **{
        f"a long answer of a tool, cut: {side}": case(
            f"{call('abcdefghijklm')}{END}",
            f"3{END}",
            multi_turn={"max_tool_response_length": 11, "tool_response_truncate_side": side},
        )
        for side in ("left", "middle", "right")
    },
}
DIFFERENT = {
    "an answer without a token": case(""),
    "a message before tool answers without its end": case(call("a"), f"3{END}"),
    "malformed tool calls": case(f"<tool_call>{{</tool_call>{END}", f"3{END}"),
    "tool calls above `max_parallel_calls`": case(f"{call('a')}{call('b')}{END}", f"ab{END}"),
    "what a call of an unknown tool is told": case(f"{call('a', 'none')}{END}", f"3{END}"),
    "prompts longer than `max_prompt_length`": case(
        f"3{END}", loop="single_turn_agent", prompt="x" * 60, lengths=(40, 40), truncation="right"
    ),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("conversations")
    build_tokenizer(4096).save_pretrained(folder / "tokenizer")
    whole = CASES | DIFFERENT
    return said_by_both(whole, dict.fromkeys(whole, folder / "tokenizer"), folder)


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_has_verls_tokens_masks_and_positions(both: dict[str, Any], name: str) -> None:
    verls, own = both[name]
    assert own | {"rules": verls.get("rules")} == {"rules": None} | verls


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_conversation_that_differs_on_purpose_is_listed(both: dict[str, Any], name: str) -> None:
    verls, own = both[name]
    assert own["response_ids"] != verls["response_ids"] or own["prompt_ids"] != verls["prompt_ids"]
    assert differences()[name]["why"]
