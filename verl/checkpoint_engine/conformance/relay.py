"""A relay between a pusher and a server, in which a test stops, cuts or delays requests. No torch."""

from __future__ import annotations

import base64
import http.client
import json
import re
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

from ..parameter_server.http_server import require_url

Moment = Literal["arrived", "sent", "answered"]
"""Of a request at the relay: before it is sent on; after; with the server's answer, which the pusher has not got."""
LOADS = ("reload_weights", "update_weights_from_ipc")
"""Methods of vLLM's workers that load weights."""
CALLS = {
    "/pause_generation": "pause",
    "/continue_generation": "resume",
    "/update_weights": "load",
    "/update_weights_from_disk": "load",
    "/update_weights_from_tensor": "load",
    "/update_weights_from_distributed": "load",
}
"""Routes whose names are other than those of vLLM's calls, and which of these they are."""
IN_CHUNKS = ("/update_weights_from_tensor", "/update_weights_from_distributed")
ARENA = re.compile(rb'"arena_path":"([^"]+)"')
"""In an order to our loader in SGLang's ranks, if it is one to load."""
RESET = struct.pack("ii", 1, 0)
"""A socket that is closed with this lingering option resets its connection."""


@dataclass
class Exchange:
    """One request on its way through the relay."""

    path: str
    body: Any
    is_cut: bool = False

    @property
    def what(self) -> str:
        """`pause`, `load`, `resume`, `question` (a pause or an order that changes nothing), or its path."""
        path = self.path.partition("?")[0]
        is_order = path in IN_CHUNKS and self._of("load_format") is not None and self.arena_path == ""
        if is_order or self._of("mode") == "in_place":
            return "question"
        if path == "/collective_rpc" and self._of("method") in LOADS:
            return "load"
        return CALLS.get(path, path.removeprefix("/"))

    @property
    def ends_load(self) -> bool:
        """Whether this load is whole, or the last part of one: that one names the version."""
        return self.path not in IN_CHUNKS or self.arena_path != "" or self._of("weight_version") is not None

    @property
    def arena_path(self) -> str:
        """The arena from which this request has a server load; empty if it does not."""
        if isinstance(info := self._of("update_info"), dict):
            return str(info.get("arena_path") or "")
        for text in self._of("serialized_named_tensors") or ():
            if (found := ARENA.search(base64.b64decode(text))) is not None:
                return found[1].decode()
        return ""

    def _of(self, key: str) -> Any:
        return self.body.get(key) if isinstance(self.body, dict) else None


@dataclass
class _Trap:
    what: str
    moment: Moment
    act: Callable[[Exchange], None]
    sprung: threading.Event = field(default_factory=threading.Event)


class Relay:
    """Listens on 127.0.0.1 and sends every request on to the server at `url`. Use as a context manager, or call
    `close`."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s`: for each answer of the server. Raises ConfigError unless `url` is http(s)://..."""
        require_url(url)
        self._server, self._timeout_s = urllib.parse.urlsplit(url), timeout_s
        self._lock, self._trap = threading.Lock(), _Trap("", "arrived", lambda _: None)
        self.is_down = False
        """While it is set, connections are reset, and those that are open, too."""
        self.num_reset = 0
        """Connections that were reset."""
        self.num_open = 0
        """Requests on their way."""
        self.gate = threading.Event()
        """Requests wait until it is set, as it is at first."""
        self.gate.set()
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._listener.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._listener.server_port}{self._server.path.rstrip('/')}"
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._listener.shutdown()
        self._listener.server_close()

    def trap(self, what: str, moment: Moment, act: Callable[[Exchange], None]) -> threading.Event:
        """Call `act` for the next request `what` at this moment, once, on the request's own thread, which waits for it.
        The event is set when `act` has returned."""
        trap = _Trap(what, moment, act)
        with self._lock:
            self._trap = trap
        return trap.sprung

    def reach(self, moment: Moment, exchange: Exchange) -> None:
        with self._lock:
            trap = self._trap
            if (trap.what, trap.moment) != (exchange.what, moment):
                return
            if moment == "answered" and trap.what == "load" and not exchange.ends_load:
                return
            self._trap = _Trap("", "arrived", lambda _: None)
        try:
            trap.act(exchange)
        finally:
            trap.sprung.set()

    def ask(self, method: str, exchange: Exchange, data: bytes) -> tuple[int, str, bytes] | None:
        """Status, content type and body of the server's answer; None if the connection was cut. Raises OSError,
        HTTPException."""
        kind = http.client.HTTPSConnection if self._server.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._server.hostname or "", self._server.port, timeout=self._timeout_s)
        with self._lock:
            self.num_open += 1
        try:
            self.gate.wait(self._timeout_s)
            self.reach("arrived", exchange)
            if exchange.is_cut or self.is_down:
                return None
            connection.request(method, exchange.path, data, {"Content-Type": "application/json"})
            self.reach("sent", exchange)
            if exchange.is_cut or self.is_down:
                return None
            answer = connection.getresponse()
            found = answer.status, answer.getheader("Content-Type") or "", answer.read()
            self.reach("answered", exchange)
            return None if exchange.is_cut or self.is_down else found
        finally:
            connection.close()
            with self._lock:
                self.num_open -= 1


def _handler(relay: Relay) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = None
            if not relay.is_down:
                body = None
                with suppress(ValueError):
                    body = json.loads(data or b"null")
                with suppress(OSError, http.client.HTTPException):
                    found = relay.ask(self.command, Exchange(self.path, body), data)
            if found is None:
                relay.num_reset += 1
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.close_connection = True
                return
            status, kind, answer = found
            with suppress(OSError):  # the pusher may be dead
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        do_POST = do_GET

        def finish(self) -> None:
            with suppress(OSError):
                super().finish()

        def log_message(self, *_: object) -> None:
            """Not on the console."""

    return Handler
