"""Tools that a model may call, and how calls are written in its text."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from verl.experimental.agent_loop.loading import load_class, read_yaml
from verl.utils.config import ConfigError

CONFIG_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


class BaseTool(ABC):
    """One tool, shared by all samples of a worker process: `execute` keeps what belongs to one call in local variables.

    `schema` is what the chat template shows the model:
    `{"type": "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema>}}`.
    """

    schema: Mapping[str, Any]
    """A class attribute, or the entry's `tool_schema` in the YAML file."""
    default_config: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: Mapping[str, Any] | None = None, schema: Mapping[str, Any] | None = None) -> None:
        """`config` is the entry's `config`. Raises ConfigError when the tool has no usable schema."""
        self.config = {**self.default_config, **(config or {})}
        if schema is not None:
            self.schema = schema
        found = getattr(self, "schema", None)
        function = found.get("function") if isinstance(found, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(f'tool {type(self).__name__}: its schema lacks {{"function": {{"name": ...}}}}')

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @abstractmethod
    async def execute(self, arguments: dict[str, Any]) -> str:
        """The text that the model gets. Must not block. What it raises is given to the model as an error text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a model's message. `error` says why it cannot be executed; then the name may be empty."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


_HERMES = re.compile(r"<tool_call>(.*?)(?:(</tool_call>)|\Z)", re.DOTALL)


def parse_hermes(text: str) -> list[ToolCall]:
    """The calls `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in `text`, malformed ones, too."""
    return [_parse_call(body, closed=bool(end)) for body, end in _HERMES.findall(text)]


PARSERS = {"hermes": parse_hermes}
"""`multi_turn.format` -> what finds the calls in the text of one assistant message."""


def _parse_call(body: str, *, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall("", {}, "the tool call is not closed with </tool_call>")
    try:
        call = json.loads(body)
    except ValueError as exc:
        return ToolCall("", {}, f"the tool call is not valid JSON: {exc}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'a tool call is {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, f"the arguments of {call['name']} are not a JSON object")
    return ToolCall(call["name"], arguments)


@cache
def load_tools(path: str) -> dict[str, BaseTool]:
    """The tools of a YAML file by name, made once per process. Raises ConfigError.

    The file holds `tools:`, a list of entries with `class_name` ("module:Class", "file.py:Class"), and optionally
    `config` (for the tool) and `tool_schema` (instead of the class's own).
    """
    content = read_yaml(path, CONFIG_KEY)
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{CONFIG_KEY}={path} holds no list of 'tools'")
    tools: dict[str, BaseTool] = {}
    for number, entry in enumerate(entries):
        where = f"{CONFIG_KEY}={path}: tool {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ConfigError(f"{where} lacks 'class_name': {entry!r}")
        if unknown := sorted(set(entry) - {"class_name", "config", "tool_schema"}):
            raise ConfigError(f"{where}: unknown {unknown}; known: class_name, config, tool_schema")
        tool: BaseTool = load_class(entry["class_name"], BaseTool, where)(entry.get("config"), entry.get("tool_schema"))
        if tool.name in tools:
            raise ConfigError(f"{where}: two tools are called {tool.name!r}")
        tools[tool.name] = tool
    return tools
