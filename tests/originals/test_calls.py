"""Tool calls inside of the reasoning: verl executes them, we do not, and that is on purpose."""

from __future__ import annotations

from tests.originals.original import VERL, computed, differences
from verl.experimental.agent_loop.thinking import USUAL, Reasoning

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEXTS = [f"<think>{CALL}</think>3", f"<think>{CALL}", CALL]


def test_verl_finds_calls_in_the_reasoning_and_the_difference_is_listed() -> None:
    ours = []
    for text in TEXTS:
        said = text
        for start, end in reversed(Reasoning((USUAL,)).spans(text)):
            said = said[:start] + said[end:]
        ours.append(said.count("<tool_call>"))
    assert (computed("find_calls.py", TEXTS, VERL), ours) == ([1, 1, 1], [0, 0, 1])
    assert "tool calls inside of the reasoning" in differences()
