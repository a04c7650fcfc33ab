"""What agent loops of environments have in common: their result, and the options of those behind a server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp

from verl.experimental.agent_loop.errors import AgentCodeError
from verl.experimental.agent_loop.openai_agent import ON_FAILURE, OpenAIAgentLoop
from verl.experimental.agent_loop.openai_endpoint import ModelAccess
from verl.experimental.agent_loop.openai_wire import TOO_LONG
from verl.experimental.agent_loop.output import AgentLoopOutput
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.plain import as_float

OF_A_SERVER = ("url", "max_turns", "connect_s", "timeout_s", "on_failure")
LARGEST_MESSAGE = 100 * 2**20
"""Bytes of one answer of a server."""
AGAIN_S = 0.5
"""Between two tries to reach a server."""


class EnvironmentAgentLoop(OpenAIAgentLoop):
    """`_work` of its subclasses returns {score, metrics}: a number, and numbers by name; or the error of an environment
    that does not score. A conversation that fails has the reward 0, and counts in `agent_loop/agent_failed`."""

    rewards = True

    def _scored(self, output: AgentLoopOutput, result: Any) -> AgentLoopOutput:
        if result is None:
            raise AgentCodeError("the environment gave no reward: its conversation has no room left")
        if isinstance(result, AgentCodeError):
            raise result
        metrics = {f"environment/{name}": value for name, value in result["metrics"].items()}
        return replace(super()._scored(output, result["score"]), metrics={**output.numbers, **metrics})


def check_server_options(
    where: str,
    options: Mapping[str, Any],
    *,
    texts: Sequence[str] = (),
    schemes: Sequence[str],
    others: Sequence[str] = (),
) -> None:
    """Of a loop that has `OF_A_SERVER`, `texts` that it cannot do without, and `others`. Raises ConfigError."""
    known = (*OF_A_SERVER, *texts, *others)
    for name in options:
        if name not in known:
            raise ConfigError(f"{where}: unknown {name!r}.{did_you_mean(name, known)}")
    for name in ("url", *texts):
        if not isinstance(options.get(name), str) or not options[name]:
            raise ConfigError(f"{where} needs {name}, a text")
    turns = options.get("max_turns", 1)
    if not isinstance(turns, int) or isinstance(turns, bool) or turns < 1:
        raise ConfigError(f"{where}: max_turns={turns!r} is no number from 1 on")
    for name in ("connect_s", "timeout_s"):
        seconds = options.get(name, 1.0)
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
            raise ConfigError(f"{where}: {name}={seconds!r} is not a positive number of seconds")
    if options.get("on_failure", "zero") not in ON_FAILURE:
        raise ConfigError(f"{where}: on_failure={options['on_failure']!r} is none of {', '.join(ON_FAILURE)}")
    try:
        address(options["url"], schemes)
    except ValueError as exc:
        raise ConfigError(f"{where}: url={options['url']!r}: {exc}") from exc


def address(url: str, schemes: Sequence[str]) -> SplitResult:
    """Raises ValueError for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError("is no address like http://host:8000")
    return parts


def finite(reward: Any) -> float:
    """Raises AgentCodeError for a reward that is no finite number."""
    number = as_float(reward)
    if number is None or not math.isfinite(number):
        raise AgentCodeError(f"the environment gave the reward {reward!r:.200}")
    return number


async def next_choice(
    http: aiohttp.ClientSession, access: ModelAccess, messages: Sequence[Any], **further: Any
) -> dict[str, Any] | None:
    """The policy's next message with its `finish_reason`, as chat completions have it; None if the conversation has no
    room for one. Raises AgentCodeError for a refused request."""
    asked = {"model": access.model, "messages": messages, **further}
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with http.post(f"{access.base_url}/chat/completions", json=asked, headers=headers) as response:
        said = await response.json()
    if response.status == 200:
        choice: dict[str, Any] = said["choices"][0]
        return choice
    error = said.get("error") or {}
    if error.get("code") == TOO_LONG:
        return None
    raise AgentCodeError(f"the policy answered {response.status}: {error.get('message')}")
