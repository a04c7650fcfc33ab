"""Conversations of agent loops against PyPI's verl: where a policy says the same, tokens, masks and positions are."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.experimental.agent_loop.scripted_server import said
from tests.originals.original import HERE, VERL, computed, differences
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.batching import to_batch
from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_loop import ToolAgentLoop
from verl.trainer.config.loader import load_config
from verl.utils.builtin.tokenizer import END, build_tokenizer
from verl.workers.config import PPOConfig
from verl.workers.rollout.records import SamplingOptions

SCHEMA = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "says it again",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "what"}},
            "required": ["text"],
        },
    },
}


def call(text: str, name: str = "echo") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"text": "{text}"}}}}</tool_call>'


def case(
    *says: str, lengths: tuple[int, int] = (600, 400), prompt: Any = "1+2?", loop: str = "tool_agent", **more: Any
):
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    multi_turn = {"max_assistant_turns": 5, "max_parallel_calls": 1, **more.get("multi_turn", {})}
    return {
        "loop": loop,
        "prompt": prompt,
        "says": list(says),
        "lengths": list(lengths),
        "multi_turn": multi_turn,
        "truncation": more.get("truncation", "left"),
    }


CASES = {
    "no call": case(f"3{END}"),
    "one call": case(f"Hm. {call('3')}{END}", f"3{END}"),
    "two calls in two messages": case(f"{call('a')}{END}", f"{call('b')}{END}", f"ab{END}"),
    "two calls at once": case(f"{call('a')}{call('b')}{END}", f"ab{END}", multi_turn={"max_parallel_calls": 2}),
    "a call behind reasoning": case(f"<think>1</think>{call('a')}{END}", f"ab{END}"),
    "an empty answer": case(END),
    "an empty answer of a tool": case(f"{call('')}{END}", f"3{END}"),
    "too many messages": case(*[f"{call('a')}{END}"] * 3, multi_turn={"max_assistant_turns": 2}),
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


class Manager:
    """Says the texts of a script, as far as the budget goes."""

    def __init__(self, tokenizer: Any, says: list[str]) -> None:
        self.says = [tokenizer.encode(text) for text in says]

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any) -> Any:
        most = SamplingOptions.of(sampling_params).max_tokens
        token_ids = self.says.pop(0)
        return said(token_ids[:most], "length" if len(token_ids) > most else "completed")


@cache
def configured(truncation: str, prompt_length: int, response_length: int, tools: str, *multi_turn: Any) -> PPOConfig:
    section = "actor_rollout_ref.rollout.multi_turn"
    return load_config(
        [
            f"data.max_prompt_length={prompt_length}",
            f"data.max_response_length={response_length}",
            f"data.truncation={truncation}",
            f"{section}.tool_config_path={tools}",
            *(f"{section}.{key}={value}" for key, value in multi_turn),
        ]
    )


def ours(case: dict[str, Any], tokenizer: Any, tools: Path) -> dict[str, Any]:
    prompt_length, response_length = case["lengths"]
    config = configured(case["truncation"], prompt_length, response_length, str(tools), *case["multi_turn"].items())
    manager = Manager(tokenizer, case["says"])
    loop = {"tool_agent": ToolAgentLoop, "single_turn_agent": SingleTurnAgentLoop}[case["loop"]](
        trainer_config=DictConfigWrap(config), server_manager=manager, tokenizer=tokenizer
    )
    sampling = SamplingOptions(max_tokens=response_length)
    try:
        output = asyncio.run(loop.run(sampling.as_dict(), raw_prompt=case["prompt"]))
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": type(exc).__name__}
    batch = to_batch(
        [output], prompt_length=prompt_length, response_length=response_length, pad_token_id=tokenizer.pad_token_id
    ).batch
    names = ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids")
    return {
        "prompt_ids": output.prompt_ids,
        "response_ids": output.response_ids,
        "response_mask": output.response_mask,
        "num_turns": output.num_turns,
        "tensors": {name: batch[name][0].tolist() for name in names},
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("conversations")
    tokenizer = build_tokenizer(4096)
    tokenizer.save_pretrained(folder / "tokenizer")
    entry = {"config": {"type": "native"}, "tool_schema": SCHEMA}
    files = {}
    for name, target in {"verl": "own_tools.Echo", "ours": f"{HERE / 'own_tools.py'}:Echo"}.items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({"tools": [{"class_name": target, **entry}]}))
    given = {"tokenizer": str(folder / "tokenizer"), "tools": str(files["verl"])}
    given["cases"] = [*(whole := CASES | DIFFERENT).values()]
    verls = computed("converse.py", given, VERL)
    return {name: (verls[row], ours(case, tokenizer, files["ours"])) for row, (name, case) in enumerate(whole.items())}


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_has_verls_tokens_masks_and_positions(both: dict[str, Any], name: str) -> None:
    verls, own = both[name]
    assert own == verls


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_conversation_that_differs_on_purpose_is_listed(both: dict[str, Any], name: str) -> None:
    verls, own = both[name]
    assert own["response_ids"] != verls["response_ids"] or own["prompt_ids"] != verls["prompt_ids"]
    assert differences()[name]["why"]
