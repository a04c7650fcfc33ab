"""What a server of an engine may answer, or what stands before one: each ends in time, in words of ours."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.http_server import http_server
from verl.checkpoint_engine.errors import TransportError, TransportTimeout
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
        (500, b"Call to load method failed: it's too long", r"\] it's too long$"),
        (500, b"Worker failed with error 'it's too long', please check the logs", r"\] it's too long$"),
        (500, b"Call to f method failed: Worker failed with error 'no', please check the logs", r"\] no$"),
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


def certificate_of(address: str, directory: Path) -> Path:
    """Of its own signature, with its key; in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    own = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = directory / "engine.pem"
    file.write_bytes(own + made.public_bytes(pem))
    return file


@pytest.mark.parametrize(
    ("address", "is_trusted", "asks", "message"),
    [
        ("127.0.0.1", True, "https", None),
        ("127.0.0.1", False, "https", "its certificate is not trusted .*self.signed.*SSL_CERT_FILE"),
        ("127.0.0.2", True, "https", "mismatch.*: name the server as its certificate does"),
        ("127.0.0.1", True, "http", "broke off: .* Does it speak TLS. Then write https://"),
    ],
)
def test_a_server_with_a_certificate_is_asked_if_that_is_trusted_or_the_remedy_is_said(
    address: str, is_trusted: bool, asks: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = certificate_of(address, tmp_path)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with http_server(lambda *_: (200, b"[1]"), tls=context) as url:
        server = HttpServer(url.replace("https", asks), timeout_s=60)
        if message is None:
            assert server.call("POST", "/pause") == [1]
        else:
            with pytest.raises(TransportError, match=message):
                server.call("POST", "/pause")


def test_a_server_without_a_certificate_that_is_asked_for_one_is_named():
    with (
        http_server(lambda *_: (200, b"[1]")) as url,
        pytest.raises(TransportError, match="it speaks no TLS that is known here .*: write http://"),
    ):
        HttpServer(url.replace("http", "https"), timeout_s=60).call("POST", "/pause")
