"""Conversations of agent loops, had by us and by PyPI's verl with a policy that says what a script has it say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from tests.experimental.agent_loop.scripted_server import said
from tests.originals.original import HERE, VERL, computed
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.batching import to_batch
from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_loop import ToolAgentLoop
from verl.trainer.config.loader import load_config
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


def case(
    *says: str, lengths: tuple[int, int] = (600, 400), prompt: Any = "1+2?", loop: str = "tool_agent", **more: Any
) -> dict[str, Any]:
    """`prompt` is a conversation, or what the user asks; `lengths` are the most tokens of prompts and of responses."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    multi_turn = {"max_parallel_calls": 1, "format": "hermes", **more.get("multi_turn", {})}
    return {
        "loop": loop,
        "prompt": prompt,
        "says": list(says),
        "lengths": list(lengths),
        "multi_turn": multi_turn,
        "truncation": more.get("truncation", "left"),
        "arguments": more.get("arguments", {}),
        "model_type": more.get("model_type"),
    }


class Manager:
    """Says the texts of a script, as far as the budget goes."""

    def __init__(self, tokenizer: Any, says: list[str]) -> None:
        self.says = [tokenizer.encode(text, add_special_tokens=False) for text in says]

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any) -> Any:
        most = SamplingOptions.of(sampling_params).max_tokens
        token_ids = self.says.pop(0)
        return said(token_ids[:most], "length" if len(token_ids) > most else "completed")


@cache
def configured(overrides: tuple[str, ...]) -> PPOConfig:
    return load_config([*overrides])


def ours(case: dict[str, Any], tokenizer: Any, tools: Path) -> dict[str, Any]:
    prompt_length, response_length = case["lengths"]
    section = "actor_rollout_ref.rollout.multi_turn"
    config = configured(
        (
            f"data.max_prompt_length={prompt_length}",
            f"data.max_response_length={response_length}",
            f"data.truncation={case['truncation']}",
            *(f"+data.apply_chat_template_kwargs.{key}={value}" for key, value in case["arguments"].items()),
            f"{section}.tool_config_path={tools}",
            *(f"{section}.{key}={value}" for key, value in case["multi_turn"].items()),
        )
    )
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


def both(
    cases: Mapping[Any, dict[str, Any]], tokenizers: Mapping[Any, Path], folder: Path
) -> dict[Any, tuple[dict[str, Any], dict[str, Any]]]:
    """What verl and we make of each case; `tokenizers` are directories."""
    entry = {"config": {"type": "native"}, "tool_schema": SCHEMA}
    files = {}
    for name, target in {"verl": "own_tools.Echo", "ours": f"{HERE / 'own_tools.py'}:Echo"}.items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({"tools": [{"class_name": target, **entry}]}))
    given = [case | {"tokenizer": str(tokenizers[name])} for name, case in cases.items()]
    verls = computed("converse.py", {"tools": str(files["verl"]), "cases": given}, VERL)
    loaded = {path: AutoTokenizer.from_pretrained(path) for path in {*tokenizers.values()}}
    return {
        name: (verls[row], ours(case, loaded[tokenizers[name]], files["ours"]))
        for row, (name, case) in enumerate(cases.items())
    }
