"""The HTTP server of an agent-loop worker, in OpenAI's form. A key says which sample a request belongs to."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from verl.envs import reach_without_proxy
from verl.experimental.agent_loop.openai_session import Session
from verl.experimental.agent_loop.openai_wire import MODEL, Asked, Refused

HOST = "127.0.0.1"
LARGEST_REQUEST = 64 * 2**20
"""Bytes: agents send whole conversations."""
RETRY_HEADER = "x-stainless-retry-count"
"""OpenAI's clients say in it how often they have sent the request before."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """What an agent gives its OpenAI client."""

    base_url: str
    api_key: str
    """Of one sample; it is invalid when the sample ends."""
    model: str = MODEL

    @property
    def environment(self) -> dict[str, str]:
        """The variables that OpenAI's clients read, and OPENAI_MODEL."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }


class Endpoint:
    """Listens on a free port of this host while samples are open. One per event loop: see `opened`."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._base_url = ""
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def opened(self, session: Session) -> AsyncIterator[ModelAccess]:
        """Answers requests of one sample inside. At its end they are cancelled; the last one closes the port."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        try:
            async with self._starting:
                if self._runner is None:
                    await self._start()
            yield ModelAccess(self._base_url, key)
        finally:
            del self._sessions[key]
            under_way = list(session.requests)
            for request in under_way:
                request.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            async with self._starting:
                if not self._sessions and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _start(self) -> None:
        reach_without_proxy(HOST)
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._base_url = f"http://{host}:{port}/v1"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        session: Session | None = None
        try:
            session = self._session(request)
            session.requests.add(task)
            asked = Asked.of(await _body(request), is_retry=request.headers.get(RETRY_HEADER, "0") != "0")
            answer = await session.answer(asked)
        except Refused as refused:
            return _refusal(refused)
        finally:
            if session is not None:
                session.requests.discard(task)
        if not asked.streams:
            return web.json_response(answer.as_json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in answer.as_chunks(with_usage=asked.with_usage):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except Refused as refused:
            return _refusal(refused)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "verl"}]})

    async def _unknown(self, request: web.Request) -> web.Response:
        what = f"{request.method} {request.path} is not served, only POST /v1/chat/completions and GET /v1/models"
        return _refusal(Refused(what, status=404))

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise Refused("the api_key belongs to no sample, or to one that has ended", status=401)
        return session


_endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = WeakKeyDictionary()


def endpoint() -> Endpoint:
    """Of the running event loop."""
    return _endpoints.setdefault(asyncio.get_running_loop(), Endpoint())


async def _body(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as exc:
        raise Refused(f"the body is not JSON: {exc}") from exc


def _refusal(refused: Refused) -> web.Response:
    # Clients repeat 5xx by themselves, and another answer would not come.
    headers = {"x-should-retry": "false"}
    return web.json_response(refused.as_json(), status=refused.status, headers=headers)
