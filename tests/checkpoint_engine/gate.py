"""A server before a server: tests see each request, and may refuse it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException

from tests.http_server import http_server
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

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        with suppress(OSError, HTTPException):  # the server behind may be dead
            return gate.ask(method, path, body)
        return None

    with http_server(answer) as gate.url:
        yield gate
