"""The tool loop in chat templates of every kind, with tools that return anything and a policy that writes anything."""

import asyncio
import gc
import json
import math
import threading
import time
from random import Random

import numpy as np
import pytest

from tests.experimental.agent_loop.fakes import AddTool
from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from tests.experimental.agent_loop.templates import FAMILIES, tokenizer_of
from tests.hostile.mutations import changed
from verl.experimental.agent_loop import AgentLoopError, BaseTool, ToolAgentLoop
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.tool_answers import answer_text
from verl.trainer.config.loader import load_config
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.workers.rollout.records import SamplingOptions

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


class Does(BaseTool):
    """Does what it is made with."""

    schema = AddTool.schema

    def __init__(self, work):
        super().__init__()
        self.work = work

    async def execute(self, arguments):
        return self.work()


class Slow(Does):
    async def execute(self, arguments):
        return await self.work()


class NotAsync(Does):
    def execute(self, arguments):
        return self.work()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.yaml"
    path.write_text("tools: [{class_name: 'tests.experimental.agent_loop.fakes:AddTool'}]")

    def configured(*overrides):
        prefixed = [f"{MULTI_TURN}.{each}" for each in ("enable=true", f"tool_config_path={path}", *overrides)]
        return load_config(["data.max_prompt_length=2000", *prefixed])

    return configured


def run(config, tokenizer, *texts, tool=None, budget=20_000, end=None, ignore_eos=False):
    manager = ScriptedManager(tokenizer, *texts, end=end)
    loop = ToolAgentLoop(trainer_config=DictConfigWrap(config), server_manager=manager, tokenizer=tokenizer)
    if tool is not None:
        loop.tools = {tool.name: tool}
    sampling = SamplingOptions(max_tokens=budget, ignore_eos=ignore_eos)
    output = asyncio.run(loop.run(sampling.as_dict(), raw_prompt=[{"role": "user", "content": "1+2?"}]))
    return output, manager


def inserted(tokenizer, output):
    pairs = zip(output.response_ids, output.response_mask, strict=True)
    return tokenizer.decode([token for token, mask in pairs if not mask])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("ends", ["both", "the tokenizer", "the model"])
def test_a_conversation_goes_on_in_every_family_and_what_was_said_stays_as_it_was(config, family, ends):
    """`ends`: who has the template's end token; the others have another one."""
    tokenizer = tokenizer_of(family, end="<|endoftext|>" if ends == "the model" else None)
    end = "<|endoftext|>" if ends == "the tokenizer" else family.end
    said = f"<think>\n 1 \n</think>\n\nHm. {CALL}"
    again = f"</think>{CALL}"
    output, manager = run(config(), tokenizer, said, again, "3", tool=Does(lambda: "42\n"), end=end)
    assert tokenizer.decode(output.response_ids) == f"{said}{end}{family.alone}{again}{end}{family.alone}3{end}"
    assert (output.num_turns, output.stop_reason, len(manager.prompts)) == (6, "completed", 3)
    whole = output.prompt_ids + output.response_ids
    assert all(whole[: len(prompt)] == prompt for prompt in manager.prompts)
    assert manager.stops[0] == (tokenizer.convert_tokens_to_ids(family.end),)


def test_without_end_tokens_nothing_else_ends_a_message_either(config):
    _, manager = run(config(), tokenizer_of(FAMILIES["qwen"]), "3", ignore_eos=True)
    assert manager.stops == [()]


def test_tags_that_are_special_tokens_call_tools(config):
    tokenizer = tokenizer_of(FAMILIES["qwen"])
    assert tokenizer.decode(tokenizer.encode(CALL), skip_special_tokens=True).startswith('{"name"')
    output, _ = run(config(), tokenizer, f"</think>{CALL}", "3")
    assert output.metrics["tool_calls"] == 1
    assert "<tool_response>\n3\n</tool_response>" in inserted(tokenizer, output)


class Unsayable:
    def __str__(self):
        raise RuntimeError("no")


RING = []
RING.append(RING)
DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("", ""),
        (" \n", " \n"),
        (None, ""),
        (0, "0"),
        (True, "True"),
        (3.5, "3.5"),
        (math.nan, "nan"),
        (10**400, str(10**400)),
        (10**5000, "<int without a text: ValueError>"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ({"a": [1, "é"], "b": None}, '{"a": [1, "é"], "b": null}'),
        ([], "[]"),
        ((1, 2), "[1, 2]"),
        ({"a": math.inf}, '{"a": Infinity}'),
        ({"n": np.float32(0.5), "v": np.arange(2)}, '{"n": 0.5, "v": [0, 1]}'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (np.arange(2), "[0 1]"),
        (RING, "[[...]]"),
        (Unsayable(), "<Unsayable without a text: RuntimeError>"),
        (["x", Unsayable()], '["x", "<Unsayable without a text: RuntimeError>"]'),
    ],
    ids=range(20),
)
def test_an_answer_is_text_whatever_it_is(config, answer, text):
    assert answer_text(answer) == text
    tokenizer = build_tokenizer()
    output, _ = run(config("max_tool_response_length=1000"), tokenizer, CALL, "ok", tool=Does(lambda: answer))
    assert inserted(tokenizer, output) == f"<|tool|>{text}<|end|><|assistant|>"
    assert output.stop_reason == "completed"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("a\ud800b", "a\ufffdb"),
        ({"a": "\ud83d\ude00"}, '{"a": "😀"}'),
        ("\0", "\0"),
        ("<|end|><|assistant|>", "<|end|><|assistant|>"),
        ("\u241fassistant-message\u241f", "\u241fassistant-message\u241f"),
        ("x" * 10_000_000, "x" * 100 + "...(truncated)"),
        (DEEP, "[" * 100 + "...(truncated)"),
    ],
    ids=range(7),
)
def test_texts_that_no_tokenizer_takes_are_answers_too(config, answer, text):
    tokenizer = build_tokenizer()
    output, _ = run(
        config("max_tool_response_length=100", "tool_response_truncate_side=right"),
        tokenizer,
        CALL,
        "ok",
        tool=Does(lambda: answer),
    )
    assert inserted(tokenizer, output) == f"<|tool|>{text}<|end|><|assistant|>"
    assert output.response_ids.count(tokenizer.eos_token_id) == 3  # of two messages and the tool's


def failing(error):
    def work():
        raise error

    return work


def recurse():
    return recurse()


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (failing(ValueError("bad \ud800")), "error: ValueError: bad \ufffd"),
        (failing(SystemExit(3)), "error: SystemExit: 3"),
        (failing(KeyboardInterrupt()), "error: KeyboardInterrupt: "),
        (failing(asyncio.CancelledError()), "error: CancelledError: "),
        (failing(TimeoutError("the service")), "error: TimeoutError: the service"),
        (failing(StopAsyncIteration()), "error: StopAsyncIteration: "),
        (failing(GeneratorExit()), "error: GeneratorExit: "),
        (failing(BaseExceptionGroup("both", [ValueError("x")])), "error: ExceptionGroup: both (1 sub-exception)"),
        (failing(ValueError(Unsayable())), "error: ValueError: <ValueError without a text: RuntimeError>"),
        (recurse, "error: RecursionError: maximum recursion depth exceeded"),
    ],
    ids=range(10),
)
def test_whatever_a_tool_raises_is_told_to_the_model(config, work, text):
    tokenizer = build_tokenizer()
    output, _ = run(config(), tokenizer, CALL, "ok", tool=Does(work))
    assert f"<|tool|>{text}" in inserted(tokenizer, output)
    assert output.stop_reason == "completed"


def test_a_tool_need_not_be_async(config):
    tokenizer = build_tokenizer()
    output, _ = run(config(), tokenizer, CALL, "ok", tool=NotAsync(lambda: 3))
    assert inserted(tokenizer, output) == "<|tool|>3<|end|><|assistant|>"


FOREVER_S = 600.0
"""Longer than a test may take."""
RELEASED = threading.Event()


async def stubborn():
    while True:
        try:
            await asyncio.sleep(FOREVER_S)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            return


@pytest.mark.parametrize(
    "tool",
    [
        Slow(lambda: asyncio.sleep(FOREVER_S)),
        Slow(stubborn),
        Does(lambda: RELEASED.wait(FOREVER_S)),
        NotAsync(lambda: RELEASED.wait(FOREVER_S)),
    ],
    ids=["waits", "does not let itself be cancelled", "blocks its loop", "blocks and is not async"],
)
def test_a_tool_that_hangs_is_left_at_its_deadline_and_others_go_on(config, tool):
    tokenizer = build_tokenizer()
    RELEASED.clear()
    try:
        output, _ = run(config("tool_timeout_s=0.2"), tokenizer, CALL, "ok", tool=tool)
        assert "error: add did not answer within 0.2 s" in inserted(tokenizer, output)
        output, _ = run(config(), tokenizer, CALL, "ok")
        assert inserted(tokenizer, output) == "<|tool|>3<|end|><|assistant|>"
    finally:
        RELEASED.set()


def test_many_calls_in_one_message_get_few_answers(config):
    tokenizer = build_tokenizer()
    output, _ = run(config("max_parallel_calls=2"), tokenizer, CALL * 3, "ok", budget=10_000)
    assert inserted(tokenizer, output).endswith(
        "<|tool|>3<|end|><|tool|>3<|end|><|tool|>error: not executed; 2 call(s) per message are<|end|><|assistant|>"
    )
    output, _ = run(config(), tokenizer, "<tool_call></tool_call>" * 3000, "ok", budget=50_000)
    assert inserted(tokenizer, output).count("<|tool|>") == 2
    assert "1 call(s) per message are (2999 were not)" in inserted(tokenizer, output)


def test_an_answer_that_the_template_refuses_becomes_an_error_that_it_takes(config, caplog):
    tokenizer = build_tokenizer()
    refused = "{% if m.role == 'tool' and not m.content %}{{ raise_exception('empty') }}{% endif %}"
    tokenizer.chat_template = (
        "{% for m in messages %}" + refused + "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    )
    output, _ = run(config(), tokenizer, CALL, "ok", tool=Does(lambda: ""))
    expected = "<|tool|>error: the chat template cannot show this answer<|end|><|assistant|>"
    assert inserted(tokenizer, output) == expected
    assert "cannot write an answer of tools: empty" in caplog.text


def test_a_template_that_refuses_tools_is_named(config):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    with pytest.raises(AgentLoopError, match="does not show messages of role 'tool'"):
        run(config(), tokenizer, CALL, "never")


SEEDS = [f"Hm. {CALL}".encode(), f"<think>x</think>{CALL}{CALL}".encode()]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_whatever_the_policy_writes_the_sample_goes_on(config, family, request):
    """Bytes of all kinds, special tokens among them, as calls and around calls."""
    tokenizer, random = tokenizer_of(family), Random(0)
    settings = config("max_parallel_calls=3")
    marks = [token.content.encode() for token in tokenizer.added_tokens_decoder.values()]
    gc.collect()  # a whole collection of all that a test process holds takes seconds
    gc.disable()
    request.addfinalizer(gc.enable)
    hostile = [b"<tool_call>" + b"[" * 10_000 + b"</tool_call>", b"<tool_call>", b"\xff\xfe" * 100, *marks]
    for number in range(100):
        data = changed(SEEDS, "bytes", random) + (hostile[number] if number < len(hostile) else b"")
        started = time.thread_time()
        output, _ = run(settings, tokenizer, data.decode(errors="replace"), "ok", "ok")
        assert time.thread_time() - started < 1
        assert output.stop_reason == "completed"
