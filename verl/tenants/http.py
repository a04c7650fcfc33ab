"""The HTTP server of the Tinker protocol: paths, keys, and what is refused."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from aiohttp import web

from verl.tenants.fields import Fields
from verl.tenants.refused import Refused
from verl.tenants.service import Service
from verl.tenants.wire import CONTENT_TYPE

API = "/api/v1/"
LARGEST_REQUEST = 64 * 2**20
"""Bytes; clients divide larger batches."""
ANSWER_WAIT_S = 20.0
"""A request for an answer that is not there yet is told to try again after so long."""
ANYBODY = "anybody"
"""Who owns what is made without keys."""
CLIENT_CONFIG = {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False}
"""What clients of `tinker` are to do: send the parts of a batch in their order."""

Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"

logger = logging.getLogger(__name__)


def application(service: Service, keys: Mapping[str, str] | None = None) -> web.Application:
    """`keys`: key to the name of its owner; None if everybody is one owner."""
    api = _Api(service, keys)
    app = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[_told])
    for name, about in {
        "healthz": lambda owner, _: {"status": "ok"},
        "names": lambda owner, _: service.names(owner),
        "get_server_capabilities": lambda owner, _: service.capabilities(),
        "samplers/{id}": service.sampler_info,
        "training_runs/{id}": service.training_run,
    }.items():
        app.router.add_get(API + name, api.of_path(about))
    calls: dict[str, Callable[[str, Fields], dict[str, Any]]] = {
        "client/config": lambda owner, _: dict(CLIENT_CONFIG),
        "client/dynamic_config": lambda owner, _: {},
        "telemetry": lambda owner, _: {"status": "accepted"},
        "create_session": lambda owner, _: service.create_session(owner),
        "session_heartbeat": service.heartbeat,
        "create_model": service.create_model,
        "get_info": service.info,
        "optim_step": service.optim_step,
        "save_weights": service.save_weights,
        "save_weights_for_sampler": service.save_weights_for_sampler,
        "load_weights": service.load_weights,
        "weights_info": service.weights_info,
        "create_sampling_session": service.create_sampler,
        "asample": service.sample,
    }
    for name, call in calls.items():
        app.router.add_post(API + name, api.of_body(call))
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get(f"{API}checkpoints", api.checkpoints)
    app.router.add_get(f"{API}training_runs/{{id}}/checkpoints", api.checkpoints)
    app.router.add_delete(f"{API}training_runs/{{id}}/checkpoints/{{checkpoint:.+}}", api.delete_checkpoint)
    app.router.add_put(f"{API}names/{{name}}", api.set_name)
    app.router.add_post(f"{API}sessions/{{id}}/finish", api.of_path(service.finish))
    app.router.add_post(f"{API}forward_backward", api.train)
    app.router.add_post(f"{API}retrieve_future", api.answer)
    app.router.add_route("*", "/{path:.*}", api.unknown)
    return app


class _Api:
    def __init__(self, service: Service, keys: Mapping[str, str] | None) -> None:
        self._service = service
        self._owners = None if keys is None else {_digest(key): owner for key, owner in keys.items()}

    def _owner(self, request: web.Request) -> str:
        if self._owners is None:
            return ANYBODY
        owner = self._owners.get(_digest(request.headers.get("X-API-Key", "")))
        if owner is None:
            raise Refused("the API key is none of this server's --keys", status=401)
        return owner

    def of_body(self, call: Callable[[str, Fields], dict[str, Any]]) -> Handler:
        """A handler of a JSON object."""

        async def handle(request: web.Request) -> web.Response:
            owner = self._owner(request)
            return web.json_response(call(owner, await _fields(request)))

        return handle

    def of_path(self, call: Callable[[str, str], dict[str, Any]]) -> Handler:
        """A handler of an id in the path, if there is one."""

        async def handle(request: web.Request) -> web.Response:
            return web.json_response(call(self._owner(request), request.match_info.get("id", "")))

        return handle

    async def train(self, request: web.Request) -> web.Response:
        owner = self._owner(request)
        if request.content_type != CONTENT_TYPE or "Content-Encoding" in request.headers:
            raise Refused(f"forward_backward takes a body of {CONTENT_TYPE}, not compressed, as tinker 0.38 sends it")
        return web.json_response(self._service.forward_backward(owner, await request.read()))

    async def answer(self, request: web.Request) -> web.Response:
        owner = self._owner(request)
        found = await self._service.answer(owner, await _fields(request), ANSWER_WAIT_S)
        if found is None:
            return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)
        if isinstance(found, bytes):
            return web.Response(body=found, content_type=CONTENT_TYPE)
        return web.json_response(found)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._service.metrics(), content_type="text/plain", charset="utf-8")

    async def checkpoints(self, request: web.Request) -> web.Response:
        owner, run = self._owner(request), request.match_info.get("id")
        limit, offset = (_count(request, name, default) for name, default in (("limit", None), ("offset", 0)))
        return web.json_response(self._service.checkpoints(owner, run, limit, offset or 0))

    async def delete_checkpoint(self, request: web.Request) -> web.Response:
        owner, where = self._owner(request), request.match_info
        self._service.delete_checkpoint(owner, where["id"], where["checkpoint"])
        return web.Response(status=204)

    async def set_name(self, request: web.Request) -> web.Response:
        owner = self._owner(request)
        told = await self._service.set_name(owner, request.match_info["name"], await _fields(request))
        return web.json_response(told)

    async def unknown(self, request: web.Request) -> web.Response:
        self._owner(request)
        where = f"{request.method} {request.path}"
        raise Refused(f"{where} is not served; docs/how-to/serve-adapters.md says what is", status=404)


@web.middleware
async def _told(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as exc:
        logger.info("%s refused: %s", request.path, exc)
        headers = {} if exc.after_s is None else {"Retry-After": str(exc.after_s)}
        return web.json_response({"error": str(exc), "category": "user"}, status=exc.status, headers=headers)


async def _fields(request: web.Request) -> Fields:
    try:
        return Fields(await request.json(), request.path.removeprefix(API))
    except ValueError as exc:
        raise Refused(f"the body is not JSON: {exc}") from exc


def _count(request: web.Request, name: str, default: int | None) -> int | None:
    text = request.query.get(name)
    if text is not None and not text.isdecimal():
        raise Refused(f"{name}={text!r:.40} is no number of checkpoints")
    return default if text is None else int(text)


def _digest(key: str) -> str:
    """Keys are compared by their digests, so that the time of a look-up says nothing of them."""
    return hashlib.sha256(key.encode()).hexdigest()
