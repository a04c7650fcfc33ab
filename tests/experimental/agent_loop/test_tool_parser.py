"""Formats of tool calls that users register, as they are written for verl."""

from __future__ import annotations

import json

import pytest

from tests.experimental.agent_loop.templates import FAMILIES, tokenizer_of
from tests.experimental.agent_loop.test_tool_loop import CALL, config, inserted, run  # noqa: F401 - a fixture
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.agent_loop.tool_parser import FunctionCall, HermesToolParser, ToolParser
from verl.utils.config import ConfigError


@ToolParser.register("brackets")
class Brackets(ToolParser):
    """`[[name {arguments}]]`; the first letter of the end of a message ends it, too."""

    seen: list = []

    @property
    def stop_token_ids(self):
        return self.tokenizer.encode("Z", add_special_tokens=False)

    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        self.seen.append((responses_ids, [tool.function.name for tool in tools]))
        head, _, rest = text.partition("[[")
        if not rest:
            return text, []
        name, _, arguments = rest.partition("]]")[0].partition(" ")
        return head, [FunctionCall(name=name, arguments=arguments)]


@pytest.fixture
def tokenizer():
    return tokenizer_of(FAMILIES["qwen"])


def test_the_loop_calls_what_a_registered_format_finds(config, tokenizer):  # noqa: F811
    Brackets.seen.clear()
    output, manager = run(config("format=brackets"), tokenizer, 'Hm. [[add {"a": 1, "b": 2}]]', "3")
    assert output.metrics["tool_calls"] == 1
    assert "<tool_response>\n3\n</tool_response>" in inserted(tokenizer, output)
    assert [names for _, names in Brackets.seen] == [["add"], ["add"]]
    assert set(tokenizer.encode("Z", add_special_tokens=False)) <= set(manager.stops[0])


def test_arguments_that_are_no_json_are_told_to_the_model(config, tokenizer):  # noqa: F811
    output, _ = run(config("format=brackets"), tokenizer, "[[add {]]", "3")
    assert "are not valid JSON" in inserted(tokenizer, output)


def test_a_format_that_nobody_registered_is_an_error_on_the_driver(config):  # noqa: F811
    with pytest.raises(ConfigError, match="multi_turn.format=hermez is not registered. Did you mean 'hermes'"):
        AgentLoopManager.check_config(config("format=hermez"))
    AgentLoopManager.check_config(config("format=brackets"))


async def test_hermes_gives_the_text_without_calls_and_the_calls_that_can_be_executed(tokenizer):
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    assert isinstance(parser, HermesToolParser)
    assert parser.stop_token_ids == []
    content, calls = await parser.extract_tool_calls(tokenizer.encode(f"Hm. {CALL}<tool_call>{{</tool_call>"))
    assert content == "Hm. "
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("add", {"a": 1, "b": 2})]
