import asyncio

import pytest

from tests.experimental.agent_loop.fakes import AddTool
from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from verl.experimental.agent_loop import AgentLoopError, BaseTool, ToolAgentLoop
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.tool_files import load_tools
from verl.experimental.agent_loop.tools import ToolCall, parse_hermes
from verl.trainer.config.loader import load_config
from verl.utils.config import ConfigError
from verl.workers.rollout.records import SamplingOptions

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def called(arguments):
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


FAKES = "tests.experimental.agent_loop.fakes"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call at all", []),
        (CALL, [ToolCall("add", {"a": 1, "b": 2})]),
        (f"Let me see.\n{CALL}\n{CALL} done", [ToolCall("add", {"a": 1, "b": 2})] * 2),
        ('<tool_call>\n{"name": "now"}\n</tool_call>', [ToolCall("now", {})]),
        ("</tool_call> <tool_cal>{}</tool_call>", []),
        (called('{"a": "\\ud83d\\ude00", "b": "\\u0000"}'), [ToolCall("add", {"a": "😀", "b": "\0"})]),
        (called('{"a": %s}' % ("9" * 1000)), [ToolCall("add", {"a": int("9" * 1000)})]),
    ],
)
def test_calls_are_found_in_hermes_text(text, calls):
    assert parse_hermes(text) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{oops}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "add"}', "not closed"),
        ("<tool_call>[1]</tool_call>", 'is {"name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'is {"name"'),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "not a JSON object"),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "not a JSON object"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not a JSON object"),
        (called('{"a": 1, "b": 2, "a": 3}'), "the key 'a' is there twice"),
        (called('{"a": NaN}'), "NaN is no number"),
        (called('{"a": -Infinity}'), "-Infinity is no number"),
        (called('{"a": 1e999}'), "a number is too large"),
        (called('{"a": 1.%s}' % ("0" * 100_000)), "a number is too large or too long"),
        (called('{"a": %s}' % ("9" * 100_000)), "more than 1000 digits"),
        (called('{"a": "\\ud800"}'), "half of a surrogate pair"),
        (called('{"\\udfff": 1}'), "half of a surrogate pair"),
        (called('{"a": %s}' % ("[" * 10_000 + "]" * 10_000)), "nested more than 64 levels deep"),
        (called('{"a": %s}' % ("[" * 100 + "]" * 100)), "nested more than 64 levels deep"),
        (called('{"a":' * 10_000 + "1" + "}" * 10_000), "nested more than 64 levels deep"),
        ("<tool_call>" + "[" * 1_000_000, "not closed"),
        ("<tool_call>" + "[" * 1_000_000 + "</tool_call>", "not valid JSON"),
        ("<tool_call>\ufffd</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>\0</tool_call>", "not valid JSON"),
        ('<tool_call><tool_call>{"name": "add"}</tool_call>', "not valid JSON"),
    ],
)
def test_a_malformed_call_is_found_with_its_error(text, error):
    (call,) = parse_hermes(text)
    assert error in call.error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no list of 'tools'"),
        ("tools: [", "is not YAML"),
        ("tools: [{config: {}}]", "tool 0 lacks 'class_name'"),
        (f"tools: [{{class_name: '{FAKES}:AddTool', confg: 1}}]", "unknown ['confg']; known: class_name"),
        (f"tools: [{{class_name: '{FAKES}:NoTool'}}]", "has no class 'NoTool'"),
        (f"tools: [{{class_name: '{FAKES}:ConstantLoop'}}]", "is not a subclass of BaseTool"),
        ("tools: [{class_name: 'no_such_module:Tool'}]", "'no_such_module' cannot be imported"),
        ("tools: [{class_name: Tool}]", 'is not "module:Class"'),
        (f"tools: [{{class_name: '{FAKES}:AddTool', idempotent: 1}}]", "idempotent=1 is neither true nor false"),
        (
            f"tools: [{{class_name: '{FAKES}:AddTool'}}, {{class_name: '{FAKES}:AddTool'}}]",
            "two tools are called 'add'",
        ),
    ],
)
def test_a_tool_file_that_cannot_be_used_says_why(tmp_path, content, message):
    path = tmp_path / "tools.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tools(str(path))
    assert message in str(caught.value)


def test_a_tool_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        load_tools(str(tmp_path / "none.yaml"))


def test_a_tool_may_live_in_a_file_and_get_schema_and_config_from_yaml(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.experimental.agent_loop import BaseTool\n"
        "class Mine(BaseTool):\n"
        "    async def execute(self, arguments):\n"
        "        return self.config['answer']\n"
    )
    (tmp_path / "tools.yaml").write_text(
        f"tools:\n- class_name: {tmp_path}/mine.py:Mine\n  config: {{answer: '42'}}\n"
        "  tool_schema: {type: function, function: {name: mine}}\n"
    )
    (tool,) = load_tools(str(tmp_path / "tools.yaml")).values()
    assert tool.name == "mine"
    assert asyncio.run(tool.execute({})) == "42"


def test_a_tool_without_a_schema_is_an_error():
    class Nameless(BaseTool):
        async def execute(self, arguments):
            return ""

    with pytest.raises(ConfigError, match="tool Nameless: its schema lacks"):
        Nameless()


@pytest.fixture
def run_loop(tokenizer, tmp_path):
    """Run the tool loop over a scripted policy; returns (output, manager)."""
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: '{FAKES}:AddTool'}}]")

    def run(*texts, overrides=(), budget=600, tokenizer=tokenizer):
        prefix = "actor_rollout_ref.rollout.multi_turn"
        settings = [f"{prefix}.enable=true", f"{prefix}.tool_config_path={tmp_path}/tools.yaml"]
        config = load_config(["data.max_prompt_length=600", *settings, *(f"{prefix}.{item}" for item in overrides)])
        manager = ScriptedManager(tokenizer, *texts)
        loop = ToolAgentLoop(trainer_config=DictConfigWrap(config), server_manager=manager, tokenizer=tokenizer)
        sampling = SamplingOptions(max_tokens=budget)
        messages = [{"role": "user", "content": "1+2?"}]
        return asyncio.run(loop.run(sampling.as_dict(), raw_prompt=messages)), manager

    return run


def inserted(tokenizer, output):
    """The text that the policy did not write."""
    pairs = zip(output.response_ids, output.response_mask, strict=True)
    return tokenizer.decode([token for token, mask in pairs if not mask])


def test_a_conversation_with_a_tool_reads_as_the_chat_template_writes_it(run_loop, tokenizer):
    output, manager = run_loop(f"Hm. {CALL}", "It is 3.")
    template = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "content": f"Hm. {CALL}"},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ],
        tools=[AddTool.schema],
        tokenize=False,
    )
    assert tokenizer.decode(output.prompt_ids + output.response_ids) == template
    assert (output.num_turns, output.stop_reason) == (4, "completed")
    assert (
        manager.prompts[1]
        == output.prompt_ids + output.response_ids[: len(manager.prompts[1]) - len(output.prompt_ids)]
    )
    assert len(manager.request_ids) == 1
    assert output.metrics["tool_calls"] == 1


def test_what_a_tool_says_is_masked_and_has_neither_log_prob_nor_version(run_loop, tokenizer):
    output, _ = run_loop(CALL, "3")
    assert inserted(tokenizer, output) == "<|tool|>3<|end|><|assistant|>"
    for mask, log_prob, version in zip(
        output.response_mask, output.response_logprobs, output.response_versions, strict=True
    ):
        assert (log_prob, version) == ((-0.5, version) if mask else (0.0, -1))
        assert version in ((1, 2) if mask else (-1,))


@pytest.mark.parametrize(
    ("call", "overrides", "answer"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [], "error: KeyError: 'b'"),
        ("<tool_call>oops</tool_call>", [], "error: the tool call is not valid JSON"),
        ('<tool_call>{"name": "ad"}</tool_call>', [], "error: unknown tool 'ad'. Did you mean 'add'?"),
        (
            '<tool_call>{"name": "add", "arguments": {"sleep": true}}</tool_call>',
            ["tool_timeout_s=0.05"],
            "error: add did not answer within 0.05 s",
        ),
        (CALL * 2, [], "error: not executed; 1 call(s) per message are"),
        (CALL * 2, ["max_parallel_calls=2"], "<|tool|>3<|end|><|tool|>3<|end|>"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 111111, "b": 0}}</tool_call>',
            ["max_tool_response_length=4", "tool_response_truncate_side=right"],
            "1111...(truncated)",
        ),
    ],
)
def test_whatever_goes_wrong_with_a_call_is_told_to_the_model(run_loop, tokenizer, call, overrides, answer):
    output, _ = run_loop(call, "I see.", overrides=overrides)
    assert answer in inserted(tokenizer, output)
    assert output.stop_reason == "completed"


def test_the_loop_ends_after_the_last_allowed_message(run_loop):
    output, manager = run_loop(CALL, CALL, CALL, overrides=["max_assistant_turns=2"])
    assert (len(manager.prompts), output.num_turns, output.stop_reason) == (2, 4, "completed")


def test_the_budget_counts_tool_answers_and_is_never_exceeded(run_loop):
    output, manager = run_loop(CALL, "x" * 500, budget=120)
    assert len(output.response_ids) == 120
    assert manager.budgets[1] == 120 - output.response_mask.index(1, output.response_mask.index(0))


def test_a_tool_answer_that_does_not_fit_ends_the_sample_as_length(run_loop, tokenizer):
    spoken = len(tokenizer.encode(CALL, add_special_tokens=False)) + 1
    output, manager = run_loop(CALL, "never", budget=spoken + 4)
    assert (len(output.response_ids), output.stop_reason, len(manager.prompts)) == (spoken, "length", 1)


def test_a_message_cut_by_the_budget_calls_no_tool(run_loop):
    output, manager = run_loop(f"{CALL}…", "never")
    assert (output.stop_reason, len(manager.prompts)) == ("length", 1)


def test_a_chat_template_that_hides_tool_messages_is_an_error(run_loop, tokenizer, monkeypatch):
    shown = "{% for m in messages if m.role != 'tool' %}{{ m.role }}:{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", shown)
    with pytest.raises(AgentLoopError, match="does not show messages of role 'tool'"):
        run_loop(CALL, "never")
