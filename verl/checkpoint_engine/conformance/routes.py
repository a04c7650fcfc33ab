"""Ways by which an update reaches a server, each through public interfaces only.

A route is a small driver: `push` returns once the server has answered that it serves the version. Routes that need a
device have a reason in `NEED_DEVICES` instead.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..errors import BackendUnavailable, CheckpointEngineError, ConfigError
from ..parameter_server.checkpoint_directory import checkpoint_files
from ..parameter_server.http_server import HttpServer, Refused, request_inference_to_update
from ..support.package import PACKAGE
from .probes import DEV_MODE
from .sglang_routes import MODES, SGLangDiskRoute, SGLangDistributedRoute, SGLangTensorRoute

PAUSE_MODES = ("wait", "abort", "keep")
LORA = "start vLLM with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
EXTENSION = f"{PACKAGE}.parameter_server.VllmColocateWorkerExtension"


class Pushing(Protocol):
    def push(self, directory: Path, version: int) -> str:
        """Have the server serve the checkpoint in `directory`; returns the label that it should report."""
        ...


class Route(Pushing, Protocol):
    labels: bool
    """Whether the server reports the version that it was given."""
    pause_modes: Sequence[str]
    """That it offers."""
    pause_mode: str
    """Of requests in flight at the next push."""

    def check(self) -> None:
        """Raises ConfigError with the remedy if the server has not what this route needs. The server keeps serving."""
        ...

    def close(self) -> None: ...


class DiskRoute:
    """vLLM's own `reload_weights` of a directory, which the server's host must have: pause, reload, forget what is
    cached, name the version, resume."""

    labels = True
    pause_modes: Sequence[str] = PAUSE_MODES

    def __init__(self, url: str, *, timeout_s: float, pause_mode: str) -> None:
        self._http = HttpServer(url, timeout_s=timeout_s)
        self.pause_mode = pause_mode

    def check(self) -> None:
        try:
            self._http.call("GET", "/is_paused")
        except Refused as exc:
            raise ConfigError(f"{self._http.url} has no routes for weight updates: {DEV_MODE}") from exc

    def push(self, directory: Path, version: int) -> str:
        call = self._http.call
        call("POST", f"/pause?mode={self.pause_mode}")
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            call("POST", "/collective_rpc", reload)
            call("POST", "/reset_prefix_cache?reset_running_requests=true")
            for cache in ("mm", "encoder"):
                call("POST", f"/reset_{cache}_cache")
            call("POST", "/update_weight_version", {"new_version": str(version)})
        finally:
            call("POST", "/resume")
        return str(version)

    def close(self) -> None:
        """Nothing stays."""


class ArenaRoute:
    """This project's publisher: shared memory, verified, all or nothing; each load compares the engine's tensors."""

    labels = True
    pause_modes: Sequence[str] = PAUSE_MODES

    def __init__(self, url: str, *, timeout_s: float, pause_mode: str) -> None:
        self._url, self._timeout_s = url, timeout_s
        self.pause_mode = pause_mode
        self._config = {
            "check_engine": "always",
            "deadlines": {"activate_s": timeout_s, "resume_s": timeout_s},
        }
        self._publisher: Any = None
        self._pushes_with = ""
        """Pause mode of the publisher."""
        self._tensors: dict[str, Any] = {}

    def check(self) -> None:
        from ..parameter_server.endpoints import Endpoint

        Endpoint(self._url, timeout_s=self._timeout_s).check(None, None)

    def push(self, directory: Path, version: int) -> str:
        from safetensors.torch import load_file

        from ..publisher import WeightPublisher

        self._tensors.clear()
        for file in checkpoint_files(directory):
            self._tensors |= load_file(file)
        if self._publisher is not None and self._pushes_with != self.pause_mode:
            self.close()
        if self._publisher is None:
            config = self._config | {"pause_mode": self.pause_mode}
            self._publisher = WeightPublisher(self._tensors, endpoints=[self._url], config=config)
            self._pushes_with = self.pause_mode
        self._publisher.push(version)
        return str(version)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


class SGLangArenaRoute(ArenaRoute):
    """The same into SGLang, whose ranks must have our loader."""

    pause_modes: Sequence[str] = tuple(MODES)

    def check(self) -> None:
        from ..engines.sglang.orders import LOADER

        if self.pause_mode == "wait":
            raise ConfigError("SGLang does not pause when its requests have ended: --pause-mode abort, or keep")

        about = HttpServer(self._url, timeout_s=self._timeout_s).call("GET", "/server_info")
        if LOADER not in (about.get("custom_weight_loader") or ()):
            raise ConfigError(
                f"the SGLang at {self._url} cannot take it: start it with --custom-weight-loader {LOADER}"
            )


class UpdateRoute:
    """`verl-sync update`: a ParameterServer, and vLLM's routes for weight updates with our engine."""

    labels = True
    pause_modes: Sequence[str] = PAUSE_MODES

    def __init__(self, url: str, *, timeout_s: float, pause_mode: str) -> None:
        self._url, self._timeout_s, self.pause_mode = url, timeout_s, pause_mode

    def check(self) -> None:
        from ..parameter_server.endpoints import Endpoint

        Endpoint(self._url, timeout_s=self._timeout_s).check(None, None)
        _require_one_worker(HttpServer(self._url, timeout_s=self._timeout_s))

    def push(self, directory: Path, version: int) -> str:
        from ..parameter_server.endpoints import Endpoint

        endpoint = Endpoint(self._url, timeout_s=self._timeout_s)

        def request(sockets: list[tuple[str, str]]) -> None:
            endpoint.update(dict(sockets), str(version), pause_mode=self.pause_mode)

        _through_parameter_server(directory, request, self._timeout_s)
        return str(version)

    def close(self) -> None:
        """Nothing stays."""


class CheckpointEngineRoute:
    """checkpoint-engine's call: `update_weights_from_ipc` of a worker extension, through `/collective_rpc`, between
    vLLM's own pause and resume."""

    labels = True
    pause_modes: Sequence[str] = PAUSE_MODES

    def __init__(self, url: str, *, timeout_s: float, pause_mode: str) -> None:
        self._disk = DiskRoute(url, timeout_s=timeout_s, pause_mode=pause_mode)
        self._http = HttpServer(url, timeout_s=timeout_s)
        self.pause_mode, self._timeout_s = pause_mode, timeout_s

    def check(self) -> None:
        _require_one_worker(self._http)
        self._disk.check()

    def push(self, directory: Path, version: int) -> str:
        call = self._http.call

        def request(sockets: list[tuple[str, str]]) -> None:
            request_inference_to_update(f"{self._http.url}/collective_rpc", dict(sockets), self._timeout_s)

        call("POST", f"/pause?mode={self.pause_mode}")
        try:
            _through_parameter_server(directory, request, self._timeout_s)
            call("POST", "/reset_prefix_cache?reset_running_requests=true")
            call("POST", "/update_weight_version", {"new_version": str(version)})
        except CheckpointEngineError as exc:
            if "no attribute 'update_weights_from_ipc'" in exc.message:
                raise ConfigError(
                    f"the workers at {self._http.url} have no such method: start vLLM with --worker-extension-cls "
                    f"{EXTENSION}"
                ) from exc
            raise
        finally:
            call("POST", "/resume")
        return str(version)

    def close(self) -> None:
        """Nothing stays."""


class AdapterRoute:
    """vLLM's own `load_lora_adapter`, in place, of a directory for each version: between pause and resume, where the
    server has them."""

    labels = False
    pause_modes: Sequence[str] = ()

    def __init__(self, url: str, *, timeout_s: float, pause_mode: str) -> None:
        self._http = HttpServer(url, timeout_s=timeout_s)
        self.pause_mode = pause_mode
        self.name = f"certify-{secrets.token_hex(4)}"
        """Of the adapter, in requests: no other one of the server."""
        self.is_loaded = False
        self._pauses = False

    def check(self) -> None:
        try:
            self._http.call("POST", "/v1/unload_lora_adapter", {"lora_name": self.name})
        except Refused as exc:
            if "cannot be found" not in exc.message:
                raise ConfigError(f"{self._http.url} takes no adapters: {LORA}") from exc
        with suppress(Refused):
            self._http.call("GET", "/is_paused")
            self._pauses, self.pause_modes = True, PAUSE_MODES

    def push(self, directory: Path, version: int) -> str:
        call = self._http.call
        body = {"lora_name": self.name, "lora_path": str(directory), "load_inplace": True}
        if self._pauses:
            call("POST", f"/pause?mode={self.pause_mode}")
        try:
            call("POST", "/v1/load_lora_adapter", body, is_json=False)
            self.is_loaded = True
        except Refused as exc:
            if "LoRA is not enabled" in exc.message:
                raise ConfigError(f"{self._http.url} takes no adapters: {LORA}") from exc
            raise
        finally:
            if self._pauses:
                call("POST", "/resume")
        return str(version)

    def unload(self) -> bool:
        """Whether the server no longer has the adapter. Idempotent."""
        if self.is_loaded:
            with suppress(CheckpointEngineError):
                self._http.call("POST", "/v1/unload_lora_adapter", {"lora_name": self.name}, is_json=False)
                self.is_loaded = False
        return not self.is_loaded

    def close(self) -> None:
        self.unload()


def _require_one_worker(server: HttpServer) -> None:
    """Raises ConfigError: the ParameterServer of a run has one rank, which serves one worker."""
    with suppress(Refused):
        workers = server.call("GET", "/get_world_size")["world_size"]
        if workers > 1:
            raise ConfigError(
                f"the engine at {server.url} has {workers} workers, and this route brings versions to one: --route "
                "arena and disk bring them to all"
            )


def _through_parameter_server(
    directory: Path, request: Callable[[list[tuple[str, str]]], None], timeout_s: float
) -> None:
    from ..parameter_server.server import ParameterServer

    with ParameterServer(rank=0, world_size=1, timeout_s=timeout_s) as server:
        server.register_checkpoint("version", files=checkpoint_files(directory))
        server.gather_metas("version")
        server.update("version", request, None)


ROUTES: dict[str, Callable[..., Route]] = {
    "arena": ArenaRoute,
    "update": UpdateRoute,
    "disk": DiskRoute,
    "checkpoint_engine": CheckpointEngineRoute,
    "lora": AdapterRoute,
}
SGLANG_ROUTES: dict[str, Callable[..., Route]] = {
    "arena": SGLangArenaRoute,
    "disk": SGLangDiskRoute,
    "tensor": SGLangTensorRoute,
    "distributed": SGLangDistributedRoute,
}
NEED_DEVICES = {
    "ipc": "vLLM's IPC engine passes handles of CUDA memory",
    "nccl": "vLLM's NCCL engine needs CUDA devices on both sides",
    "sparse_nccl": "vLLM's sparse NCCL engine needs CUDA devices on both sides",
    "m2n": "vLLM's M2N engine needs CUDA devices on both sides",
    "sharded_rdt": "vLLM's engine over Ray Direct Transport needs CUDA devices",
    "modelexpress": "vLLM's ModelExpress engine needs a ModelExpress server and RDMA",
    "trl": "TRL's vllm-serve joins an NCCL group",
    "verl": "verl 0.9.1's vLLMColocateWorkerExtension fails in vLLM for CPUs: 'Parameter' object has no attribute "
    "'weight_loader'",
}
"""Routes that cannot run without a device, and why."""


def require_route(name: str) -> None:
    """Raises ConfigError for an unknown route, BackendUnavailable for one that needs a device."""
    if name in NEED_DEVICES:
        raise BackendUnavailable(f"--route {name} is skipped: {NEED_DEVICES[name]}")
    if name not in ROUTES | SGLANG_ROUTES:
        known = dict.fromkeys([*ROUTES, *SGLANG_ROUTES, *NEED_DEVICES])
        raise ConfigError(f"--route {name} is unknown: {', '.join(known)}")


def route_of(name: str, url: str, *, timeout_s: float, pause_mode: str, sglang: bool = False) -> Route:
    """`sglang`: the server is one of SGLang, else of vLLM. Raises what `require_route` does."""
    require_route(name)
    routes = SGLANG_ROUTES if sglang else ROUTES
    if name not in routes:
        other, this = ("vLLM", "SGLang") if sglang else ("SGLang", "vLLM")
        raise ConfigError(f"--route {name} is {other}'s: {this} has {', '.join(routes)}")
    return routes[name](url, timeout_s=timeout_s, pause_mode=pause_mode)


class Pushed:
    """A push on a thread of its own, while requests are in flight. `push` of `route` may raise: `result` raises it."""

    def __init__(self, route: Pushing, directory: Path, version: int) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._label = ""
        self._thread = threading.Thread(target=self._run, args=(route, directory, version), daemon=True)
        self._thread.start()

    def _run(self, route: Pushing, directory: Path, version: int) -> None:
        try:
            self._label = route.push(directory, version)
        except Exception as exc:  # noqa: BLE001 - `result` raises it on the thread that asked
            self._error = exc
        finally:
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout_s: float) -> str | None:
        """The label, or None if the push has not ended in time."""
        if not self._done.wait(timeout_s):
            return None
        if self._error is not None:
            raise self._error
        return self._label
