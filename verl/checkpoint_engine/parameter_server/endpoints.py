"""A running `vllm serve` with our plugin, as the command line sees it: its HTTP routes for weight updates. No torch.

vLLM has these routes only where `VLLM_SERVER_DEV_MODE=1`, and our engine only where it was asked for:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "verl_arena"}'
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import ActivationError, ConfigError, TransportError, TransportTimeout
from ..support.package import PACKAGE

ENGINE_NAME = f"{PACKAGE.partition('.')[0]}_arena"
"""What to write in vLLM's `weight_transfer_config` to have weights loaded from a node arena or a ParameterServer.

`verl_arena`, or `verl_sync_arena`: where both distributions are installed, an engine speaks with its own."""
PAUSE_MODES = ("abort", "wait", "keep")
TEST_TIMEOUT_S = 10.0
"""For a first answer of a server that has nothing to do but to answer."""
FLAG = f'--weight-transfer-config \'{{"backend": "{ENGINE_NAME}"}}\''

MOST_NBYTES = 2**24
"""Of an answer: these are a few words or numbers."""

_OF_WORKER = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)

# Engines are in one's own cluster: a proxy that the environment names for the outside is not asked.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Refused(ActivationError):
    """The server answered with an error. `status` is HTTP's."""

    def __init__(self, message: str, *, status: int, member: str) -> None:
        super().__init__(message, member=member)
        self.status = status


class Endpoint:
    """One server. Every method blocks; raises TransportError, or TransportTimeout, if it cannot be reached."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s` is for each request that does something. Raises ConfigError unless `url` is http(s)://..."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the endpoint {url!r} is not a URL like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s

    def check(self, parallel_size: int | None, tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None) -> None:
        """Make sure that an update can work, before anything happens: the engine goes on serving.

        `parallel_size` is the number of its workers that will be fed, None if all of them take the same; `tensors` are
        names, dtypes and shapes to be held against its model, or None. Raises ConfigError that says what to change,
        ActivationError that lists what does not fit.
        """
        everybody, workers = self._world_sizes()
        if workers != everybody:
            raise ConfigError(
                f"the server at {self.url} runs {everybody // workers} data-parallel engines: start one server for "
                "each, and name all of them as endpoints"
            )
        if parallel_size is not None and workers != parallel_size:
            raise ConfigError(
                f"the engine at {self.url} has {workers} workers: set --inference-parallel-size {workers} "
                f"(it is {parallel_size})"
            )
        try:
            self._call("POST", "/init_weight_transfer_engine", {"init_info": {"tensors": tensors}})
        except Refused as exc:
            if "init_info" in exc.message or "not configured" in exc.message:
                raise ConfigError(f"the engine at {self.url} cannot take our weights: start vLLM with {FLAG}") from exc
            raise

    def _world_sizes(self) -> tuple[int, int]:
        """Workers of all engines behind this server, and of one of them."""
        path = "/get_world_size"
        try:
            everybody = self._call("GET", path, timeout_s=TEST_TIMEOUT_S)["world_size"]
            return everybody, self._call("GET", f"{path}?include_dp=false", timeout_s=TEST_TIMEOUT_S)["world_size"]
        except Refused as exc:
            if exc.status == 404:
                raise ConfigError(
                    f"{self.url} has no routes for weight updates: start vLLM with VLLM_SERVER_DEV_MODE=1 in its "
                    f"environment, and with {FLAG}"
                ) from exc
            raise
        except (KeyError, TypeError) as exc:
            raise ConfigError(f"what answers at {self.url} is not vLLM: correct --endpoint") from exc
        except TransportError as exc:
            raise TransportError(
                f"no vLLM answers at {self.url} ({exc.message}): start it, or correct --endpoint"
            ) from exc

    def update(self, socket_paths: Mapping[str, str], version: str, *, pause_mode: str = "wait") -> None:
        """Have every worker take its weights from its socket, and serve them as `version`.

        Raises ActivationError if the engine refuses. It then serves nothing: it holds a mixture of weights and stays
        paused until an update succeeds.
        """
        self.pause(pause_mode)
        self.load({"socket_paths": dict(socket_paths), "timeout_s": self._timeout_s}, version)
        self.resume()

    def pause(self, mode: str) -> None:
        """Stop generating; `mode` is one of `PAUSE_MODES`. Idempotent."""
        self._call("POST", f"/pause?mode={mode}")

    def load(self, update_info: Mapping[str, Any], version: str) -> None:
        """Have every worker load what `update_info` says, as `version`, while the engine is paused. As `update`."""
        self._start()
        try:
            self._call("POST", "/update_weights", {"update_info": dict(update_info)})
        except (ActivationError, TransportError):
            with suppress(ActivationError, TransportError):  # of its workers, one has raised; the others wait for this
                self._call("POST", "/finish_weight_update")
            raise
        self._call("POST", "/finish_weight_update", {"weight_version": version})
        self._call("POST", "/reset_prefix_cache?reset_running_requests=true")

    def resume(self) -> None:
        """Generate again. Idempotent."""
        self._call("POST", "/resume")

    def _start(self) -> None:
        try:
            self._call("POST", "/start_weight_update")
        except Refused as exc:
            if "already active" not in exc.message:
                raise
            # Whoever began it was killed in the middle. Of several workers one has given up, the others wait.
            self._call("POST", "/finish_weight_update")
            self._call("POST", "/start_weight_update")

    def version(self) -> str:
        """What the engine says that it serves; `default` for the weights that it started with."""
        found: str = self._call("GET", "/weight_info")["weight_version"]
        return found

    def _call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=json.dumps(body).encode() if body is not None else b"" if method == "POST" else None,
            headers={"Content-Type": "application/json"},
        )
        try:
            with _opener.open(request, timeout=timeout_s or self._timeout_s) as answer:
                return json.loads(_body(answer, path) or b"null")
        except urllib.error.HTTPError as exc:
            with exc:
                text = _message(exc.read(MOST_NBYTES))
            raise Refused(text or exc.reason, status=exc.code, member=self.url) from exc
        except TimeoutError as exc:
            raise TransportTimeout(
                f"no answer to {path} within {timeout_s or self._timeout_s} s", member=self.url
            ) from exc
        except urllib.error.URLError as exc:
            if isinstance(exc.reason, TimeoutError):
                raise TransportTimeout(f"no connection within {timeout_s or self._timeout_s} s") from exc
            reason = exc.reason.strerror if isinstance(exc.reason, OSError) else exc.reason
            raise TransportError(f"{reason}", member=self.url) from exc
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as exc:
            raise TransportError(f"{path} broke off: {type(exc).__name__}: {exc}", member=self.url) from exc


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
