"""What a server of an engine may answer, or what stands before one: each ends in time, in words of ours."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.http_server import http_server
from verl.checkpoint_engine.errors import TransportTimeout
from verl.checkpoint_engine.parameter_server.http_server import HttpServer, Refused


@contextmanager
def dripping(first: bytes) -> Iterator[str]:
    """Answers `first`, and a byte every tenth of a second then. Its URL."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(first)
                    while not ended.wait(0.1):
                        connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 No\r\n\r\n"])
def test_an_answer_that_drips_ends_in_time(first: bytes):
    with dripping(first) as url, pytest.raises(TransportTimeout, match="no answer to /slow within 0.5 s"):
        HttpServer(url, timeout_s=60).call("GET", "/slow", timeout_s=0.5)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b'{"error": {"message": "engine is dead"}}', "engine is dead"),
        (503, b"busy", "busy"),
        (401, b'{"error": "Unauthorized"}', "Unauthorized .it asks for a key, and none is sent"),
        (403, b"", "Forbidden .it asks for a key"),
    ],
)
def test_an_error_is_one_whatever_its_status_is(status: int, body: bytes, message: str):
    with http_server(lambda *_: (status, body)) as url, pytest.raises(Refused, match=message) as caught:
        HttpServer(url, timeout_s=60).call("POST", "/pause")
    assert caught.value.status == status


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_and_named(status: int):
    """A client would ask again with GET, or drop what it sent."""
    asked = []

    def answer(method: str, path: str, _: bytes) -> tuple[int, bytes]:
        asked.append((method, path))
        return status, b""

    with (
        http_server(answer, headers={"Location": "http://other:1/pause"}) as url,
        pytest.raises(Refused, match="it redirects to http://other:1/pause: name the server itself"),
    ):
        HttpServer(url, timeout_s=60).call("POST", "/pause")
    assert asked == [("POST", "/pause")]


def test_a_server_may_be_behind_a_path():
    with http_server(lambda method, path, body: (200, b'"' + path.encode() + b'"')) as url:
        assert HttpServer(f"{url}/models/one/", timeout_s=60).call("POST", "/pause?mode=keep") == (
            "/models/one/pause?mode=keep"
        )
