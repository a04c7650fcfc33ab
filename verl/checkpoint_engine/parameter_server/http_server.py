"""Requests to the HTTP server of an inference engine, in JSON. No torch."""

from __future__ import annotations

import http
import http.client
import json
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import ActivationError, ConfigError, TransportError, TransportTimeout

TEST_TIMEOUT_S = 10.0
"""The timeout of requests that cause no work."""
MOST_NBYTES = 2**24
"""The most bytes of an answer, which has a few words or numbers."""
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING")
"""OpenSSL's errors for an answer without TLS."""
_WRAPPED = (
    re.compile(r"Call to \w+ method failed: (.*)", re.DOTALL),
    re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL),
)
"""How vLLM's engine core tells an error, and in that the error of a worker that is a process of its own."""


class Refused(ActivationError):
    """The server answered with an error. `status`: the HTTP status."""

    def __init__(self, message: str, *, status: int, member: str) -> None:
        super().__init__(message, member=member)
        self.status = status


class HttpServer:
    """One server. Every method blocks, and raises TransportError if the server cannot be reached."""

    def __init__(self, url: str, *, timeout_s: float, uds: str | None = None) -> None:
        """`timeout_s`: the default for a request. `uds`: a unix socket to connect to instead of the host of `url`.
        Raises ConfigError unless `url` is http(s)://..."""
        require_url(url)
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._uds = uds

    def is_healthy(self, timeout_s: float = TEST_TIMEOUT_S) -> bool:
        """Whether the server answers `/health` without an error within `timeout_s`."""
        try:
            self.call("GET", "/health", timeout_s=timeout_s, is_json=False)
        except (Refused, TransportError):
            return False
        return True

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None, is_json: bool = True
    ) -> Any:
        """Send a request; return the decoded answer. Raises Refused, TransportError, TransportTimeout.

        An engine is in the user's own cluster, so it uses no proxy of the environment and follows no redirect.
        """
        timeout_s = timeout_s or self.timeout_s
        too_late = TransportTimeout(f"no answer to {path} within {timeout_s} s", member=self.url)
        is_late = threading.Event()
        try:
            connection = self._connected(timeout_s)
        except TimeoutError as exc:
            raise TransportTimeout(f"no connection within {timeout_s} s") from exc
        except OSError as exc:
            raise TransportError(_why_not_connected(exc), member=self.url) from exc

        sock = connection.sock

        def cut() -> None:  # each read by itself ends in time where a byte comes now and then
            is_late.set()
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        watch = threading.Timer(timeout_s, cut)
        watch.daemon = True
        watch.start()
        try:
            data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
            prefix = urllib.parse.urlsplit(self.url).path
            connection.request(method, prefix + path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status >= http.HTTPStatus.MULTIPLE_CHOICES:
                refused = self._refused(answer)
                raise too_late if is_late.is_set() else refused
            answered = _body(answer, path)
            found = json.loads(answered or b"null") if is_json else answered.decode(errors="replace")
        except TimeoutError as exc:
            raise too_late from exc
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as exc:
            if is_late.is_set():
                raise too_late from exc
            broken = isinstance(exc, http.client.BadStatusLine)  # what is read as an answer, or nothing at all
            hint = ". Does it speak TLS? Then write https://" if broken and not isinstance(sock, ssl.SSLSocket) else ""
            raise TransportError(f"{path} broke off: {type(exc).__name__}: {exc}{hint}", member=self.url) from exc
        finally:
            watch.cancel()
            connection.close()
        if is_late.is_set():
            raise too_late
        if isinstance(found, dict) and found.get("error"):
            raise Refused(_message(answered), status=answer.status, member=self.url)
        return found

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        """Raises OSError."""
        parts = urllib.parse.urlsplit(self.url)
        is_secret = parts.scheme == "https" and self._uds is None
        kind = http.client.HTTPSConnection if is_secret else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        if self._uds is None:
            connection.connect()
        else:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(timeout_s)
            connection.sock.connect(self._uds)
        return connection

    def _refused(self, answer: http.client.HTTPResponse) -> Refused:
        text = _message(answer.read(MOST_NBYTES)) or answer.reason
        if answer.status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            text += " (it asks for a key, and none is sent: start it without one)"
        elif (place := answer.getheader("Location")) is not None:
            text = f"it redirects to {place}: name the server itself"
        return Refused(text, status=answer.status, member=self.url)


def _why_not_connected(exc: OSError) -> str:
    """With the remedy, of what is wrong with TLS."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        if "mismatch" in exc.verify_message:
            return f"{exc.verify_message}: name the server as its certificate does"
        return (
            f"its certificate is not trusted ({exc.verify_message}): name the file of its authority's certificate in "
            "the environment variable SSL_CERT_FILE"
        )
    if isinstance(exc, ssl.SSLError) and exc.reason in NO_TLS:
        return f"it speaks no TLS that is known here ({exc.reason}): write http:// for a server without"
    return f"{exc.strerror or exc}"


def request_inference_to_update(
    url: str, socket_paths: Mapping[str, str], timeout: float = 300.0, uds: str | None = None
) -> None:
    """Make vLLM's workers load from a ParameterServer; `req_func` calls it. The name is checkpoint-engine's.

    `url`: the server's `/collective_rpc`, which vLLM has with `VLLM_SERVER_DEV_MODE=1`; its workers need
    `VllmColocateWorkerExtension`. `socket_paths`: device id to path, from `req_func`. `timeout`: seconds. `uds`: the
    server's unix socket. Raises Refused with a worker's error, TransportError, TransportTimeout, ConfigError.
    """
    body = {"method": "update_weights_from_ipc", "args": [dict(socket_paths)], "timeout": timeout}
    HttpServer(url, timeout_s=timeout, uds=uds).call("POST", "", body)


def require_url(endpoint: str) -> None:
    """Raises ConfigError unless `endpoint` is http(s)://host, with or without a port."""
    try:
        parts = urllib.parse.urlsplit(endpoint)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_one = is_one and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(f"the endpoint {endpoint!r} is not a URL like http://127.0.0.1:8000")


def _body(answer: http.client.HTTPResponse, path: str) -> bytes:
    body = answer.read(MOST_NBYTES + 1)
    if len(body) > MOST_NBYTES:
        raise TransportError(f"the answer to {path} has more than {MOST_NBYTES} bytes")
    return body


def _message(body: bytes) -> str:
    """What vLLM, one of its workers or its web framework says about an error, wherever it says it."""
    text = body.decode(errors="replace")
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        while isinstance(found, dict):
            found = next((found[key] for key in ("error", "message", "detail") if key in found), str(found))
        text = str(found)
    for wrapped in _WRAPPED:
        if (within := wrapped.search(text)) is not None:
            text = within[1]
    return text
