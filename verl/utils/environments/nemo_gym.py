"""Tasks of NeMo-Gym: rows with `responses_create_params`, a request in the form of OpenAI's Responses, and what their
server checks. They become chat messages, and a chat becomes the response that is checked."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.utils.config import ConfigError, did_you_mean

ROW = "nemo_gym"
"""Where in `extra_info` a sample has its row, in JSON: as columns, rows that differ would get each other's fields."""
PARAMS = "responses_create_params"
READ = ("input", "instructions", "tools", "max_output_tokens")
OF_THE_RUN = (
    "model",
    "temperature",
    "top_p",
    "reasoning",
    "stream",
    "store",
    "user",
    "metadata",
    "parallel_tool_calls",
)
"""Without effect here, as requests of agents have them."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"tool_choice": ("auto",), "text": ({},), "include": ([],)}
"""Other values cannot be kept to."""
TEXTS = ("input_text", "output_text", "text")


def task_of(row: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The (messages, tools) of a row, as chat completions take them. Raises ValueError, which says what is wrong."""
    params = row.get(PARAMS) if isinstance(row, Mapping) else None
    if not params or not isinstance(params, Mapping):
        raise ValueError(f"is no object with {PARAMS}")
    tools = _tools(params.get("tools") or [])
    for key, value in params.items():
        if value is None or key in (*READ, *OF_THE_RUN) or value in NEUTRAL.get(key, ()):
            continue
        if key == "tool_choice" and value == "none" and not tools:
            continue
        remedy = "" if key in NEUTRAL else did_you_mean(key, (*READ, *OF_THE_RUN, *NEUTRAL))
        raise ValueError(f"{PARAMS}.{key}={value!r:.100} is not supported.{remedy}")
    limit = params.get("max_output_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"{PARAMS}.max_output_tokens={limit!r:.100} is no number from 1 on")
    return _messages(params), tools


def items_of(message: Mapping[str, Any], reasoning: str) -> list[dict[str, Any]]:
    """The output items of a policy's chat message, whose content is without its `reasoning`."""
    items: list[dict[str, Any]] = []
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": _id("rs"), "summary": summary})
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        content: list[Any] = [{"type": "output_text", "text": message["content"] or "", "annotations": []}]
        head = {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed"}
        items.append({**head, "content": content})
    for call in calls:
        function = {name: call["function"][name] for name in ("name", "arguments")}
        items.append(
            {"type": "function_call", "id": _id("fc"), "call_id": call["id"], "status": "completed", **function}
        )
    return items


def response_of(params: Mapping[str, Any], output: Sequence[Any], model: str, *, is_whole: bool) -> dict[str, Any]:
    """What the conversation has added to the input. Without `is_whole` it ended for want of room."""
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "output": list(output),
        "tools": params.get("tools") or [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "status": "completed" if is_whole else "incomplete",
    }


def nemo_gym_samples(path: Path, split: str, agent: str) -> list[dict[str, Any]]:
    """In verl's schema, of a file of rows; `agent` is the name of their agent loop. Raises ConfigError."""
    samples: list[dict[str, Any]] = []
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} has no rows in JSON: {exc}") from exc
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages, _ = task_of(row)
        except ValueError as exc:
            raise ConfigError(f"{path}: line {number} {exc}") from exc
        samples.append(
            {
                "data_source": agent,
                "agent_name": agent,
                "prompt": messages,
                "ability": "environment",
                "reward_model": {"style": "environment", "ground_truth": ""},
                "extra_info": {"split": split, "index": len(samples), ROW: line},
            }
        )
    if not samples:
        raise ConfigError(f"{path} has no rows")
    return samples


def _tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for number, tool in enumerate(given):
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise ValueError(f"{PARAMS}.tools[{number}] is no function with a name: {tool!r:.100}")
        fields = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in fields if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def _messages(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = params.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ValueError(f"{PARAMS}.input is neither a text nor a list of items")
    messages: list[dict[str, Any]] = []
    if params.get("instructions"):
        messages.append({"role": "system", "content": str(params["instructions"])})
    thought = ""
    for number, item in enumerate(items):
        where = f"{PARAMS}.input[{number}]"
        kind = (item.get("type") or "message") if isinstance(item, Mapping) else None
        if kind == "message" and item.get("role") in ("system", "developer", "user", "assistant"):
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": thought + _text(item.get("content"), where)})
            thought = ""
        elif kind == "reasoning":
            parts = (part.get("text") for part in item.get("summary") or [])
            thought += "".join(f"<think>{text}</think>" for text in parts if text)
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": thought})
                thought = ""
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = _text(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            raise ValueError(f"{where} is not supported: {item!r:.100}")
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part that is no text: {part!r:.100}")
    return "\n".join(part["text"] for part in parts)


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
