"""`NemoGymAgentLoop`: environments behind a resources server of NeMo-Gym 0.4 (https://docs.nvidia.com/nemo/gym).

Each sample has a session of its own, a cookie: `/seed_session`, `/TOOL` for each call of the policy, then `/verify`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

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
from verl.experimental.agent_loop.thinking import Reasoning
from verl.utils.environments.nemo_gym import PARAMS, ROW, items_of, response_of, task_of
from verl.utils.plain import as_float

SCHEMES = ("http", "https")


class NemoGymAgentLoop(EnvironmentAgentLoop):
    """Lets the policy call the tools of its row until it answers without one. The server's `/verify` gives the reward.

    Samples come from `python -m verl.utils.data prepare nemo_gym`.
    """

    def __init__(
        self,
        *,
        url: str,
        max_turns: int = 16,
        connect_s: float = 60.0,
        timeout_s: float = 600.0,
        on_failure: str = "zero",
        **kwargs: Any,
    ) -> None:
        """`url` is the server's. A conversation ends with an answer without calls, after `max_turns` answers, or when
        it is too long. `connect_s`: how long the server may be away."""
        super().__init__(timeout_s=timeout_s, on_failure=on_failure, **kwargs)
        address(url, SCHEMES)
        self.url, self.max_turns, self.connect_s = url.rstrip("/"), max_turns, connect_s

    @classmethod
    def check_options(cls, where: str, **options: Any) -> None:
        check_server_options(where, options, schemes=SCHEMES)

    async def _work(self, access: ModelAccess, sample: Mapping[str, Any]) -> dict[str, Any] | AgentCodeError:
        row = _row(sample)
        timeout = aiohttp.ClientTimeout(total=None)  # the sample has one
        async with aiohttp.ClientSession(timeout=timeout) as policy, _Server(self.url) as server:
            await self._seed(server, row)
            output, metrics, is_whole = await self._conversation(policy, access, server, row)
            response = response_of(row[PARAMS], output, access.model, is_whole=is_whole)
            try:
                found = await server.json("verify", {**row, "response": response})
                score = finite(found.get("reward"))
            except AgentCodeError as exc:  # what is raised after a conversation without room is put down to that
                return exc
        numbers = {name: as_float(value) for name, value in found.items() if name not in (*row, "reward", "response")}
        told = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
        return {"score": score, "metrics": told | metrics}

    async def _seed(self, server: _Server, row: Mapping[str, Any]) -> None:
        """Waits for `connect_s` for a server that does not answer. Raises AgentSetupError if there is none."""
        deadline = asyncio.get_running_loop().time() + self.connect_s
        while True:
            try:
                await server.json("seed_session", row)
            except aiohttp.ClientConnectorError as exc:
                if asyncio.get_running_loop().time() > deadline:
                    raise AgentSetupError(f"no resources server of NeMo-Gym answers at {self.url}: {exc}") from exc
                await asyncio.sleep(AGAIN_S)
            else:
                return

    async def _conversation(
        self, policy: aiohttp.ClientSession, access: ModelAccess, server: _Server, row: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, float], bool]:
        """Its output items, metrics, and whether it had room to its end."""
        messages, tools = task_of(row)
        asked = {"tools": tools, "max_completion_tokens": row[PARAMS].get("max_output_tokens")}
        names = {tool["function"]["name"] for tool in tools}
        output: list[dict[str, Any]] = []
        counts = {"turns": 0.0, "tool_calls": 0.0, "tool_errors": 0.0}
        while counts["turns"] < self.max_turns:
            choice = await next_choice(policy, access, messages, **asked)
            if choice is None:
                return output, counts, False
            counts["turns"] += 1
            message = choice["message"]
            messages.append(message)
            output += self._items(message)
            if choice["finish_reason"] == "length":
                return output, counts, False
            for call in message.get("tool_calls") or ():
                counts["tool_calls"] += 1
                text, is_error = await _called(server, call["function"], names)
                counts["tool_errors"] += is_error
                output.append({"type": "function_call_output", "call_id": call["id"], "output": text})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            if not message.get("tool_calls"):
                break
        return output, counts, True

    def _items(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """With the message's reasoning apart: servers read what it says outside."""
        text, thought, rest, done = message["content"] or "", "", "", 0
        reasoning = Reasoning.of(self.tokenizer)
        for start, end in reasoning.spans(text):
            rest, thought, done = rest + text[done:start], thought + text[start:end], end
        for mark in (mark for pair in reasoning.marks for mark in pair):
            thought = thought.replace(mark, "")
        return items_of({**message, "content": rest + text[done:]}, thought)


class _Server:
    """A session of the server. It has a connection for each request: one that is kept may close while the policy
    thinks, and a call must not be sent twice."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(force_close=True),
            cookie_jar=aiohttp.CookieJar(unsafe=True, quote_cookie=False),  # of addresses without a name, too
        )

    async def ask(self, path: str, body: Any) -> tuple[int, str]:
        """Status and text. Raises AgentCodeError without an answer, ClientConnectorError if nothing was sent."""
        read = bytearray()
        try:
            async with self._http.post(f"{self._url}/{quote(path, safe='')}", json=body) as response:
                async for part in response.content.iter_chunked(2**16):
                    read += part
                    if len(read) > LARGEST_MESSAGE:
                        raise AgentCodeError(f"the environment answered {path} with over {LARGEST_MESSAGE >> 20} MiB")
        except aiohttp.ClientConnectorError:
            raise
        except (OSError, aiohttp.ClientError) as exc:
            raise AgentCodeError(f"the environment ended in {path}: {type(exc).__name__}: {exc}") from exc
        return response.status, read.decode(errors="replace")

    async def json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises as `ask`, AgentSetupError if the server has no such route or does not know such rows, and
        AgentCodeError for another answer than an object."""
        status, text = await self.ask(path, body)
        try:
            found = json.loads(text)
        except ValueError as exc:
            found = exc
        wrong = _wrong_fields(found) if status == 422 else ""
        if status == 404 or wrong:
            raise AgentSetupError(
                f"the server at {self._url} is none for these rows: {path}: {status}: {wrong or text[:500]}"
            )
        if status != 200 or not isinstance(found, dict):
            raise AgentCodeError(f"the environment failed in {path}: {status}: {text[:500]}")
        return found

    async def __aenter__(self) -> _Server:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()


async def _called(server: _Server, function: Mapping[str, Any], names: set[str]) -> tuple[str, bool]:
    """What the policy is told, and whether that is an error: of its own, or one that the server says. Only the row's
    tools are called: the server's other routes give rewards.

    Raises AgentCodeError if the server is gone."""
    name = function["name"]
    if name not in names:
        return json.dumps({"error": f"there is no tool {name!r}"}), True
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as exc:
        return json.dumps({"error": f"the arguments are no JSON: {exc}"}), True
    try:
        status, text = await server.ask(name, arguments)
    except aiohttp.ClientConnectorError as exc:
        raise AgentCodeError(f"the environment ended before {name}: {exc}") from exc
    if status in (502, 503, 504):
        raise AgentCodeError(f"the environment failed in {name}: {status}: {text[:500]}")
    return text, status >= 400


def _wrong_fields(found: Any) -> str:
    """Those of the row that a server refuses; empty if it is the policy's response."""
    details = found.get("detail") if isinstance(found, dict) else None
    wrong = []
    for each in details if isinstance(details, list) else ():
        place = each.get("loc") if isinstance(each, dict) else None
        if isinstance(place, list) and place[1:2] != ["response"]:
            wrong.append(f"{'.'.join(map(str, place[1:]))}: {each.get('msg')}")
    return "; ".join(wrong)[:500]


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Raises AgentSetupError for a sample without one."""
    row: Any = (sample.get("extra_info") or {}).get(ROW)
    try:
        row = json.loads(row) if isinstance(row, str) else row
        task_of(row)
    except ValueError as exc:
        raise AgentSetupError(
            f"extra_info.{ROW} {exc}: `python -m verl.utils.data prepare nemo_gym` writes samples with it"
        ) from exc
    return dict(row)
