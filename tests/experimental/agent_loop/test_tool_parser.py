"""Formats of tool calls that users register, as they are written for verl."""

from __future__ import annotations

import json

import pytest

from tests.experimental.agent_loop.templates import FAMILIES, HARMONY, tokenizer_of
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
    output, manager = run(config("format=brackets"), tokenizer, '</think>Hm. [[add {"a": 1, "b": 2}]]', "3")
    assert output.metrics["tool_calls"] == 1
    assert "<tool_response>\n3\n</tool_response>" in inserted(tokenizer, output)
    assert [names for _, names in Brackets.seen] == [["add"], ["add"]]
    assert set(tokenizer.encode("Z", add_special_tokens=False)) <= set(manager.stops[0])


def test_arguments_that_are_no_json_are_told_to_the_model(config, tokenizer):  # noqa: F811
    output, _ = run(config("format=brackets"), tokenizer, "</think>[[add {]]", "3")
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


THOUGHT = "<|channel|>analysis<|message|>I call to=functions.no <|end|><|start|>assistant"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}


@pytest.mark.parametrize(
    "call",
    [
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        THOUGHT + '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>',
    ],
)
async def test_gpt_oss_calls_the_function_that_a_message_is_addressed_to(call):
    parser = ToolParser.get_tool_parser("gpt-oss", tokenizer_of(HARMONY, end="<|return|>"))
    said = parser.tokenizer.encode(call)
    assert [(one.name, one.arguments) for one in await parser.calls(said, [SCHEMA])] == [("add", {"a": 1})]
    content, _ = await parser.extract_tool_calls(said)
    assert content in ("", THOUGHT.removesuffix("<|start|>assistant"))
    assert parser.stop_token_ids == parser.tokenizer.encode("<|call|>")


async def test_gpt_oss_calls_nobody_in_a_thought_or_an_answer_and_nothing_that_is_no_json():
    parser = ToolParser.get_tool_parser("gpt-oss", tokenizer_of(HARMONY, end="<|return|>"))
    said = THOUGHT + "<|channel|>final<|message|>to=functions.add<|return|>"
    assert await parser.calls(parser.tokenizer.encode(said), [SCHEMA]) == []
    [call] = await parser.calls(parser.tokenizer.encode(" to=functions.add<|message|>{<|call|>"), [SCHEMA])
    assert (call.name, call.arguments) == ("add", {})
    assert "are not valid JSON" in call.error


def test_the_loop_goes_on_behind_a_call_of_gpt_oss(config):  # noqa: F811
    call = THOUGHT + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
    tokenizer = tokenizer_of(HARMONY, end="<|return|>")
    output, manager = run(config("format=gpt-oss"), tokenizer, call, "<|channel|>final<|message|>3<|return|>")
    assert inserted(tokenizer, output) == HARMONY.alone.replace('"42\\n"', '"3"')
    assert tokenizer.encode("<|call|>")[0] in manager.stops[0]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen3_coder", "<tool_call><function=add><parameter=a>3</parameter><parameter=b>4</parameter></function>"),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key><arg_value>4"),
        ("pythonic", "[add(a=3, b='4')]"),
    ],
)
async def test_a_format_of_vllm_is_read_by_vllm(name, call, tokenizer):
    closed = {"qwen3_coder": "</tool_call>", "glm45": "</arg_value>\n</tool_call>"}
    parser = ToolParser.get_tool_parser(name, tokenizer)
    for _ in range(2):
        said = tokenizer.encode(call + closed.get(name, "") + "<|im_end|>")
        assert [(one.name, one.arguments) for one in await parser.calls(said, [SCHEMA])] == [
            ("add", {"a": 3, "b": "4"})
        ]
        assert await parser.calls(tokenizer.encode("Three.<|im_end|>"), [SCHEMA]) == []


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["deepseek_v3", "openai"])
def test_a_format_of_vllm_that_does_not_fit_the_tokenizer_is_refused(config, tokenizer, name):  # noqa: F811
    AgentLoopManager.check_config(config(f"format={name}"))
    with pytest.raises(ConfigError, match=f"multi_turn.format={name} cannot be read with this tokenizer"):
        AgentLoopManager.check_tokenizer(config(f"format={name}"), "tool_agent", tokenizer)
