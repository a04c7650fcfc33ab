"""What the operator of a server does after a fault: look whether it is paused, resume it, load from disk. No torch."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from typing import Protocol

from ..errors import ActivationError, TransportTimeout
from ..parameter_server.http_server import TEST_TIMEOUT_S, HttpServer, Refused
from .routes import DiskRoute, Route
from .sglang_routes import SGLangDiskRoute

UNREADY_S = 1.0
"""Patience with a server of SGLang that reports itself that it generates nothing."""


class Operator(Protocol):
    resuming: str
    """The call that resumes, for a report."""

    def is_paused(self) -> bool:
        """Raises TransportError if the server does not answer."""
        ...

    def resume(self, timeout_s: float) -> None:
        """Raises ActivationError if the server refuses to, or then generates nothing within `timeout_s`;
        TransportError."""
        ...

    def disk(self, pause_mode: str) -> Route:
        """The server's own load from disk, after which any route may go on."""
        ...


class VLLMOperator:
    """Of a server of vLLM."""

    resuming = "POST /resume"

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s`: of a load."""
        self._http = HttpServer(url, timeout_s=timeout_s)

    def is_paused(self) -> bool:
        try:
            return bool(self._http.call("GET", "/is_paused", timeout_s=TEST_TIMEOUT_S)["is_paused"])
        except Refused:
            return False

    def resume(self, timeout_s: float) -> None:
        self._http.call("POST", "/resume", timeout_s=timeout_s)

    def disk(self, pause_mode: str) -> Route:
        return DiskRoute(self._http.url, timeout_s=self._http.timeout_s, pause_mode=pause_mode)


class SGLangOperator:
    """Of a server of SGLang, which is paused if it generates nothing. Its `/ready` tells of `/pause_generation`, and of
    a `/health` that was late; not of a rank that stays paused itself."""

    resuming = "POST /continue_generation"

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s`: of a load."""
        self._http = HttpServer(url, timeout_s=timeout_s)

    def is_paused(self) -> bool:
        try:
            self._generate(TEST_TIMEOUT_S if self._is_ready() else UNREADY_S)
        except TransportTimeout:
            return True
        except Refused:  # it answers
            pass
        return False

    def _is_ready(self) -> bool:
        try:
            self._http.call("GET", "/ready", timeout_s=TEST_TIMEOUT_S, is_json=False)
        except Refused as exc:
            return exc.status != HTTPStatus.SERVICE_UNAVAILABLE
        return True

    def resume(self, timeout_s: float) -> None:
        self._http.call("POST", "/continue_generation", {}, timeout_s=timeout_s)
        try:
            self._generate(timeout_s)
        except TransportTimeout as exc:
            raise ActivationError(
                f"it answered {self.resuming}, and no token within {timeout_s:g} s", member=self._http.url
            ) from exc

    def _generate(self, timeout_s: float) -> None:
        """One token. Raises ActivationError, TransportTimeout."""
        sampling = {"temperature": 0, "max_new_tokens": 1}
        self._http.call("POST", "/generate", {"input_ids": [1, 2], "sampling_params": sampling}, timeout_s=timeout_s)

    def disk(self, pause_mode: str) -> Route:
        """An update that is open is ended first: it has no owner."""
        with suppress(Refused):
            self._http.call("POST", "/end_weight_update", {})
        return SGLangDiskRoute(self._http.url, timeout_s=self._http.timeout_s, pause_mode=pause_mode)


def operator_of(url: str, *, timeout_s: float, sglang: bool) -> Operator:
    """`sglang`: the server is one of SGLang, else of vLLM."""
    return (SGLangOperator if sglang else VLLMOperator)(url, timeout_s=timeout_s)
