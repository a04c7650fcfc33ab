"""A server of an inference engine: what is asked of it over HTTP, in JSON. No torch."""

from __future__ import annotations

import http.client
import json
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import ActivationError, ConfigError, TransportError, TransportTimeout

TEST_TIMEOUT_S = 10.0
"""For a first answer of a server that has nothing to do but to answer."""
MOST_NBYTES = 2**24
"""Of an answer: these are a few words or numbers."""
_OF_WORKER = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)

# Engines are in one's own cluster: a proxy that the environment names for the outside is not asked.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _OverUnixSocket(urllib.request.HTTPHandler):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)

    def _connection(self, host: str, **options: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(host, **options)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(connection.timeout)
        connection.sock.connect(self._path)
        return connection


class Refused(ActivationError):
    """The server answered with an error. `status` is HTTP's."""

    def __init__(self, message: str, *, status: int, member: str) -> None:
        super().__init__(message, member=member)
        self.status = status


class HttpServer:
    """Every method blocks; raises TransportError, or TransportTimeout, if it cannot be reached."""

    def __init__(self, url: str, *, timeout_s: float, uds: str | None = None) -> None:
        """`timeout_s` is for each request that does something. `uds`: a unix socket to connect to instead of the host
        of `url`. Raises ConfigError unless `url` is http(s)://..."""
        require_url(url)
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._opener = _opener if uds is None else urllib.request.build_opener(_OverUnixSocket(uds))

    def is_healthy(self, timeout_s: float = TEST_TIMEOUT_S) -> bool:
        """Whether it is there, and says that it can be asked."""
        try:
            self.call("GET", "/health", timeout_s=timeout_s, is_json=False)
        except (Refused, TransportError):
            return False
        return True

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None, is_json: bool = True
    ) -> Any:
        """What it answers, out of JSON. Raises Refused, TransportError, TransportTimeout."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=json.dumps(body).encode() if body is not None else b"" if method == "POST" else None,
            headers={"Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=timeout_s or self.timeout_s) as answer:
                answered = _body(answer, path)
                return json.loads(answered or b"null") if is_json else answered.decode(errors="replace")
        except urllib.error.HTTPError as exc:
            with exc:
                text = _message(exc.read(MOST_NBYTES))
            raise Refused(text or exc.reason, status=exc.code, member=self.url) from exc
        except TimeoutError as exc:
            raise TransportTimeout(
                f"no answer to {path} within {timeout_s or self.timeout_s} s", member=self.url
            ) from exc
        except urllib.error.URLError as exc:
            if isinstance(exc.reason, TimeoutError):
                raise TransportTimeout(f"no connection within {timeout_s or self.timeout_s} s") from exc
            reason = exc.reason.strerror if isinstance(exc.reason, OSError) else exc.reason
            raise TransportError(f"{reason}", member=self.url) from exc
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as exc:
            raise TransportError(f"{path} broke off: {type(exc).__name__}: {exc}", member=self.url) from exc


def request_inference_to_update(
    url: str, socket_paths: Mapping[str, str], timeout: float = 300.0, uds: str | None = None
) -> None:
    """Have vLLM's workers load from a ParameterServer, under checkpoint-engine's name: `req_func` calls it.

    `url`: the server's `/collective_rpc`, which vLLM has where `VLLM_SERVER_DEV_MODE=1`; its workers need
    `VllmColocateWorkerExtension`. `socket_paths`: what `req_func` got, by device id. `timeout`: seconds. `uds`: the
    server's unix socket. Raises Refused with what a worker raised, TransportError, TransportTimeout, ConfigError.
    """
    body = {"method": "update_weights_from_ipc", "args": [dict(socket_paths)], "timeout": timeout}
    HttpServer(url, timeout_s=timeout, uds=uds).call("POST", "", body)


def require_url(endpoint: str) -> None:
    """Raises ConfigError unless `endpoint` is http(s)://host, with a port or without."""
    try:
        parts = urllib.parse.urlsplit(endpoint)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
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
    of_worker = _OF_WORKER.search(text)
    return of_worker[1] if of_worker else text
