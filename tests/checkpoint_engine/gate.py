"""A server before a server: tests see each request, and may refuse it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from verl.checkpoint_engine.errors import ActivationError

TIMEOUT_S = 300.0


class Gate:
    def __init__(self, behind: str) -> None:
        self.behind, self.url = behind, ""
        """Of the server to which it passes on, which may be another one later; its own."""
        self.before: Callable[[str], object] = lambda path: None
        """Called with the path of each request; an ActivationError of it is the answer."""

    def ask(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        try:
            self.before(target.partition("?")[0])
        except ActivationError as exc:
            return 500, json.dumps({"error": {"message": exc.message}}).encode()
        connection = HTTPConnection(self.behind.removeprefix("http://"), timeout=TIMEOUT_S)
        try:
            connection.request(method, target, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def passed_on(url: str) -> Iterator[Gate]:
    gate = Gate(url)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with suppress(OSError, HTTPException):  # who asked may be dead, or the server behind
                status, data = gate.ask(self.command, self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    between = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=between.serve_forever, args=(0.05,), daemon=True).start()
    gate.url = f"http://127.0.0.1:{between.server_port}"
    try:
        yield gate
    finally:
        between.shutdown()
        between.server_close()
