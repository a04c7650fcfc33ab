"""`OpenEnvAgentLoop`: environments behind a server of OpenEnv (https://github.com/meta-pytorch/OpenEnv), version 0.3.

Each sample has a session of its own, a WebSocket: `reset`, then a `step` for each answer of the policy.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlunsplit

import aiohttp

from verl.experimental.agent_loop.environment_agent import (
    AGAIN_S,
    LARGEST_MESSAGE,
    EnvironmentAgentLoop,
    address,
    check_server_options,
    finite,
    next_choice,
)
from verl.experimental.agent_loop.errors import AgentCodeError, AgentSetupError
from verl.experimental.agent_loop.openai_endpoint import ModelAccess
from verl.utils.config import ConfigError

CAPACITY = "CAPACITY_REACHED"
"""OpenEnv's code if the server has as many sessions as it may; they come and go."""
CLOSED_WITHIN = aiohttp.ClientWSTimeout(ws_close=2.0)
"""Seconds for the server to say goodbye."""
SCHEMES = ("http", "https", "ws", "wss")
RESET = "reset"
"""Where in `extra_info` a sample has arguments of its `reset`."""


class OpenEnvAgentLoop(EnvironmentAgentLoop):
    """Runs an episode for each sample. Its rewards are added up."""

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
        check_server_options(where, options, texts=("action",), schemes=SCHEMES, others=("observation",))
        if not isinstance(options.get("observation", ""), (str, type(None))):
            raise ConfigError(f"{where}: observation={options['observation']!r} is no name of a field")

    async def _work(self, access: ModelAccess, sample: Mapping[str, Any]) -> dict[str, Any]:
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
    ) -> dict[str, Any]:
        score, turns = _reward(found), 0
        while not found.get("done") and turns < self.max_turns:
            _add(messages, self._shown(found))
            choice = await next_choice(http, access, messages)
            if choice is None:
                break
            answer = str(choice["message"]["content"] or "")
            turns += 1
            messages.append({"role": "assistant", "content": answer})
            found = await environment.ask("step", {self.action: answer})
            score += _reward(found)
        return {"score": score, "metrics": {"turns": float(turns), "done": float(bool(found.get("done")))}}

    def _shown(self, found: Mapping[str, Any]) -> str:
        """Raises AgentSetupError if the environment has no field `observation`."""
        observation = found.get("observation")
        if self.observation is not None:
            if not isinstance(observation, Mapping) or self.observation not in observation:
                fields = ", ".join(observation) if isinstance(observation, Mapping) else type(observation).__name__
                raise AgentSetupError(f"the environment shows no field {self.observation!r}, but {fields}")
            observation = observation[self.observation]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)


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
    return 0.0 if reward is None else finite(reward)


def _address(url: str) -> str:
    """Of the WebSocket of a server at `url`. Raises ValueError for what is none."""
    parts = address(url, SCHEMES)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/ws", parts.query, ""))
