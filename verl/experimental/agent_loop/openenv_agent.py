"""`OpenEnvAgentLoop`: environments behind a server of OpenEnv (https://github.com/meta-pytorch/OpenEnv), version 0.3.

Each sample has a session of its own, a WebSocket: `reset`, then a `step` for each answer of the policy.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from verl.experimental.agent_loop.errors import AgentCodeError, AgentSetupError
from verl.experimental.agent_loop.openai_agent import ON_FAILURE, OpenAIAgentLoop
from verl.experimental.agent_loop.openai_endpoint import ModelAccess
from verl.experimental.agent_loop.openai_wire import TOO_LONG
from verl.experimental.agent_loop.output import AgentLoopOutput
from verl.utils.config import ConfigError, did_you_mean

CAPACITY = "CAPACITY_REACHED"
"""OpenEnv's code if the server has as many sessions as it may; they come and go."""
AGAIN_S = 0.5
CLOSED_WITHIN = aiohttp.ClientWSTimeout(ws_close=2.0)
"""Seconds for the server to say goodbye."""
LARGEST_MESSAGE = 100 * 2**20
"""Bytes, as OpenEnv's own client has it."""
RESET = "reset"
"""Where in `extra_info` a sample has arguments of its `reset`."""


class OpenEnvAgentLoop(OpenAIAgentLoop):
    """Runs an episode for each sample. Its rewards are added up; a session that fails has the reward 0, and counts in
    `agent_loop/agent_failed`."""

    rewards = True

    def __init__(
        self,
        *,
        url: str,
        action: str,
        observation: str | None = None,
        max_turns: int = 16,
        connect_s: float = 60.0,
        timeout_s: float = 600.0,
        on_failure: str = "zero",
        **kwargs: Any,
    ) -> None:
        """`url` is the server's. An action has the policy's answer in its field `action`. The policy gets the field
        `observation` of what the environment returns, or all of it as JSON. An episode ends when it is done, after
        `max_turns` answers, or when the conversation is too long. `connect_s`: how long the server may be away."""
        super().__init__(timeout_s=timeout_s, on_failure=on_failure, **kwargs)
        self.address = _address(url)
        self.action, self.observation = action, observation
        self.max_turns, self.connect_s = max_turns, connect_s

    @classmethod
    def check_options(cls, where: str, **options: Any) -> None:
        known = ("url", "action", "observation", "max_turns", "connect_s", "timeout_s", "on_failure")
        for name in options:
            if name not in known:
                raise ConfigError(f"{where}: unknown {name!r}.{did_you_mean(name, known)}")
        for name in ("url", "action"):
            if not isinstance(options.get(name), str) or not options[name]:
                raise ConfigError(f"{where} needs {name}, a text")
        if not isinstance(options.get("observation", ""), (str, type(None))):
            raise ConfigError(f"{where}: observation={options['observation']!r} is no name of a field")
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
            _address(options["url"])
        except ValueError as exc:
            raise ConfigError(f"{where}: url={options['url']!r}: {exc}") from exc

    async def _work(self, access: ModelAccess, sample: Mapping[str, Any]) -> dict[str, float]:
        arguments = (sample.get("extra_info") or {}).get(RESET) or {}
        timeout = aiohttp.ClientTimeout(total=None)  # the sample has one
        async with aiohttp.ClientSession(timeout=timeout) as http:
            environment, found = await self._begun(http, arguments)
            async with environment:
                return await self._episode(http, access, environment, found, list(sample["messages"] or []))

    async def _begun(self, http: aiohttp.ClientSession, arguments: Mapping[str, Any]) -> tuple[_Session, Any]:
        """A session, and what its environment shows at first. Waits for a server that is full, and for `connect_s` for
        one that does not answer.

        Raises AgentSetupError if there is no such server, AgentCodeError if the environment cannot begin."""
        deadline = asyncio.get_running_loop().time() + self.connect_s
        while True:
            try:
                socket = await http.ws_connect(self.address, max_msg_size=LARGEST_MESSAGE, timeout=CLOSED_WITHIN)
            except (aiohttp.ClientError, OSError) as exc:
                if asyncio.get_running_loop().time() > deadline:
                    raise AgentSetupError(f"no server of OpenEnv answers at {self.address}: {exc}") from exc
                await asyncio.sleep(AGAIN_S)
                continue
            session = _Session(socket)
            try:
                return session, await session.ask("reset", arguments)
            except _Full:
                await session.close()
                await asyncio.sleep(AGAIN_S)
            except BaseException:
                await session.close()
                raise

    async def _episode(
        self, http: aiohttp.ClientSession, access: ModelAccess, environment: _Session, found: Any, messages: list[Any]
    ) -> dict[str, float]:
        score, turns = _reward(found), 0
        while not found.get("done") and turns < self.max_turns:
            _add(messages, self._shown(found))
            answer = await _answer(http, access, messages)
            if answer is None:
                break
            turns += 1
            messages.append({"role": "assistant", "content": answer})
            found = await environment.ask("step", {self.action: answer})
            score += _reward(found)
        return {"score": score, "turns": float(turns), "done": float(bool(found.get("done")))}

    def _shown(self, found: Mapping[str, Any]) -> str:
        """Raises AgentSetupError if the environment has no field `observation`."""
        observation = found.get("observation")
        if self.observation is not None:
            if not isinstance(observation, Mapping) or self.observation not in observation:
                fields = ", ".join(observation) if isinstance(observation, Mapping) else type(observation).__name__
                raise AgentSetupError(f"the environment shows no field {self.observation!r}, but {fields}")
            observation = observation[self.observation]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    def _scored(self, output: AgentLoopOutput, result: Any) -> AgentLoopOutput:
        if result is None:
            raise AgentCodeError("the environment gave no reward: its conversation has no room left")
        metrics = {f"environment/{name}": result[name] for name in ("turns", "done")}
        return replace(super()._scored(output, result["score"]), metrics={**output.numbers, **metrics})


class _Full(AgentCodeError):
    pass


class _Session:
    """One environment of the server. Closing it ends it there."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """What the environment answers: `observation`, `reward` and `done`. Raises AgentCodeError if it fails."""
        try:
            await self._socket.send_json({"type": kind, "data": dict(data)})
            said = await self._socket.receive_json()
        except (TypeError, ValueError, OSError, aiohttp.ClientError) as exc:
            raise AgentCodeError(f"the environment ended in {kind}: {type(exc).__name__}: {exc}") from exc
        found = said.get("data") if isinstance(said, dict) else None
        if not isinstance(found, dict) or said.get("type") not in ("observation", "error"):
            raise AgentCodeError(f"the environment answered {kind} with no observation: {str(said)[:200]}")
        if said["type"] == "error":
            kind_of = _Full if found.get("code") == CAPACITY else AgentCodeError
            raise kind_of(f"the environment failed in {kind}: {found.get('message')} ({found.get('code')})")
        return found

    async def close(self) -> None:
        await self._socket.close()

    async def __aenter__(self) -> _Session:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _add(messages: list[Any], text: str) -> None:
    """Templates want turns: what follows a user's message becomes a part of it."""
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        messages[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def _reward(found: Mapping[str, Any]) -> float:
    """Raises AgentCodeError for one that is no number."""
    reward = found.get("reward")
    if reward is None:
        return 0.0
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise AgentCodeError(f"the environment gave the reward {reward!r}")
    return float(reward)


async def _answer(http: aiohttp.ClientSession, access: ModelAccess, messages: list[Any]) -> str | None:
    """The policy's answer; None if the conversation has no room for it. Raises AgentCodeError for a refused request."""
    asked = {"model": access.model, "messages": messages}
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with http.post(f"{access.base_url}/chat/completions", json=asked, headers=headers) as response:
        said = await response.json()
    if response.status == 200:
        return str(said["choices"][0]["message"]["content"] or "")
    error = said.get("error") or {}
    if error.get("code") == TOO_LONG:
        return None
    raise AgentCodeError(f"the policy answered {response.status}: {error.get('message')}")


def _address(url: str) -> str:
    """Of the WebSocket of a server at `url`. Raises ValueError for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ValueError("is no address like http://host:8000")
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/ws", parts.query, ""))
