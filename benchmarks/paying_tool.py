"""A tool that pays, which must not be called twice, and a format in which every message of a model is a call of it.

For `make soak`: a model without training makes no calls that could be read.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from benchmarks import counted_engine  # noqa: F401  its engine is that of the same run
from verl.experimental.agent_loop import BaseTool
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.experimental.agent_loop.tools import AgentData

NAME = "pay"
ONE_IN = 16
"""Of all tokens, those that end a message."""
BEGUN, ENDED = "begun", "ended"


@ToolParser.register(NAME)
class EveryMessageParser(ToolParser):
    @property
    def stop_token_ids(self) -> list[int]:
        return list(range(0, len(self.tokenizer), ONE_IN))

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        return "", [FunctionCall(name=NAME, arguments="{}")]


class PayingTool(BaseTool):
    """It writes what it does into a file of its process in `config["directory"]`. A payment takes up to `most_s`."""

    schema: Mapping[str, Any] = {
        "type": "function",
        "function": {"name": NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    default_config: ClassVar[Mapping[str, Any]] = {"directory": ".", "most_s": 2.0}

    async def execute(self, arguments: dict[str, Any]) -> str:
        await asyncio.sleep(random.uniform(0, self.config["most_s"]))
        return "paid"

    async def answer(self, arguments: dict[str, Any], agent_data: AgentData) -> str:
        call = f"{agent_data.idempotency_key} {agent_data.request_id} {len(agent_data.tool_rewards)}"
        path = Path(self.config["directory"], str(os.getpid()))
        _append(path, f"{BEGUN} {call}")
        paid = await self.execute(arguments)
        _append(path, f"{ENDED} {call}")
        agent_data.tool_rewards.append(0.0)  # that of the next turn is another call
        return paid

    async def outcome_of(self, arguments: dict[str, Any], agent_data: AgentData) -> Any:
        agent_data.tool_rewards.append(0.0)
        return await self.outcome(arguments, agent_data.idempotency_key)


def _append(path: Path, line: str) -> None:
    with path.open("a") as ledger:
        ledger.write(f"{line}\n")


def keys_of(directory: Path) -> tuple[str, ...]:
    """Of a run with that tool, whose files are in `directory`."""
    directory.mkdir(parents=True)
    entry = {"class_name": f"{__name__}:{PayingTool.__name__}", "config": {"directory": str(directory)}}
    tools = directory.with_suffix(".yaml")
    tools.write_text(yaml.safe_dump({"tools": [entry]}))
    turns = "actor_rollout_ref.rollout.multi_turn"
    return (
        f"actor_rollout_ref.model.external_lib={__name__}",
        f"{turns}.enable=true",
        f"{turns}.format={NAME}",
        f"{turns}.max_assistant_turns=4",
        f"{turns}.tool_config_path={tools}",
        "data.max_prompt_length=320",
        "data.max_response_length=192",
    )


def is_paying(directory: Path, pid: int) -> bool:
    """Whether a call of that process has begun and not ended."""
    path = directory / str(pid)
    lines = path.read_text().splitlines() if path.exists() else []
    return 2 * sum(line.startswith(BEGUN) for line in lines) > len(lines)


def payments(directory: Path) -> tuple[int, int, int]:
    """All that have begun; how many of them were made before, and how many are another call in the turn of one that
    had begun."""
    calls: Counter[str] = Counter(_begun(directory))
    turns = Counter(call.split(" ", 1)[1] for call in calls)
    return sum(calls.values()), sum(calls.values()) - len(calls), len(calls) - len(turns)


def _begun(directory: Path) -> Iterator[str]:
    for path in directory.iterdir():
        for line in path.read_text().splitlines():
            what, call = line.split(" ", 1)
            if what == BEGUN:
                yield call
