"""Loads the tools that a YAML file lists, including tools written for verl."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from verl.experimental.agent_loop.tools import BaseTool
from verl.experimental.agent_loop.verl_tool import VerlTool
from verl.tools.base_tool import BaseTool as ToolOfVerl
from verl.utils.config import ConfigError
from verl.utils.loading import load_class, read_entries

CONFIG_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"

FIELDS = ("class_name", "config", "tool_schema", "idempotent")


@cache
def load_tools(path: str) -> dict[str, BaseTool]:
    """The tools of a YAML file by name, made once per process. Raises ConfigError.

    The file holds `tools:`, a list of entries with `class_name` ("module:Class", "file.py:Class"), and optionally
    `config` (for the tool), `tool_schema` and `idempotent` (instead of the class's own). A class is a `BaseTool` or
    verl's.
    """
    tools: dict[str, BaseTool] = {}
    for where, entry in read_entries(path, CONFIG_KEY, "tool", "tools", FIELDS):
        tool = _tool(entry, where)
        tool.idempotent = entry.get("idempotent", tool.idempotent)
        if not isinstance(tool.idempotent, bool):
            raise ConfigError(f"{where}: idempotent={tool.idempotent!r} is neither true nor false")
        if tool.name in tools:
            raise ConfigError(f"{where}: two tools are called {tool.name!r}")
        tools[tool.name] = tool
    return tools


def _tool(entry: Mapping[str, Any], where: str) -> BaseTool:
    found = load_class(entry["class_name"], (BaseTool, ToolOfVerl), where)
    config, schema = entry.get("config"), entry.get("tool_schema")
    if issubclass(found, ToolOfVerl):
        return VerlTool.from_entry(found, config, schema, where)
    tool: BaseTool = found(config, schema)
    return tool
