"""A server whose answers are what a function returns."""

from __future__ import annotations

import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import MSG_DONTWAIT, MSG_PEEK

_answering = threading.local()


def client_has_left() -> bool:
    """Whether the client of the request that this thread answers has closed its connection."""
    try:
        return not _answering.connection.recv(1, MSG_PEEK | MSG_DONTWAIT)
    except OSError as exc:
        return not isinstance(exc, BlockingIOError)


Answer = Callable[[str, str, bytes], tuple[int, bytes] | None]


def handler_of(answer: Answer, headers: Mapping[str, str] | None = None) -> type[BaseHTTPRequestHandler]:
    """For a server of `http.server` or `socketserver`; what `http_server` takes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # who asked may be dead
                _answering.connection = self.connection
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                found = answer(self.command, self.path, body)
                if found is not None:
                    self.send_response(found[0])
                    for name, value in {"Content-Length": str(len(found[1])), **(headers or {})}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(found[1])

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Not on the console."""

    return Handler


@contextmanager
def http_server(
    answer: Answer,
    *,
    socket: Path | None = None,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Its URL, or the path of its `socket`. `answer(method, path, body)` returns status and body, or None for no
    answer; `headers` go with each; requests that come side by side are answered so."""

    handler = handler_of(answer, headers)
    server: socketserver.BaseServer
    if socket is not None:
        server = socketserver.ThreadingUnixStreamServer(str(socket), handler)
        url = str(socket)
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        if tls is not None:  # each connection shakes hands on the thread that serves it
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
