"""`certify --engine`: a server that certify starts for one run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..engines.leftovers import Leftovers
from ..engines.sglang.orders import LOADER
from ..errors import BackendUnavailable, ConfigError
from ..links.network import LOOPBACK
from ..parameter_server.endpoints import ENGINE_NAME
from ..parameter_server.http_server import HttpServer
from ..support.network import reserve_port
from ..support.package import PACKAGE
from .oracle import longest_context
from .routes import EXTENSION

MOST_TOKENS = 512
"""Of a prompt and its answer; certify asks for fewer."""
POLL_S = 0.2
ENDS_WITHIN_S = 20.0
SHOWN_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Engine:
    module: str
    model: str
    """Flag of the model's directory."""
    ranks: str
    longest: str
    by_route: Mapping[str, Sequence[str]]
    """Routes that need flags to these; each further route needs none."""
    adapters: Sequence[str] = ()
    flags: Sequence[str] = ()


UPDATES = ("--weight-transfer-config", json.dumps({"backend": ENGINE_NAME}))
ADAPTERS = ("--enable-lora", "--max-loras", "2")
"""vLLM for CPUs computes requests without an adapter with that of the last slot."""
ENGINES = {
    "vllm": Engine(
        module="vllm.entrypoints.openai.api_server",
        model="--model",
        ranks="--tensor-parallel-size",
        longest="--max-model-len",
        by_route={
            "arena": UPDATES,
            "update": UPDATES,
            "checkpoint_engine": ("--worker-extension-cls", EXTENSION),
            "lora": ADAPTERS,
        },
        adapters=ADAPTERS,
        flags=("--gpu-memory-utilization", "0.5"),
    ),
    "sglang": Engine(
        module="sglang.launch_server",
        model="--model-path",
        ranks="--tp-size",
        longest="--context-length",
        by_route={"arena": ("--custom-weight-loader", LOADER)},
    ),
}
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}


def arguments(
    name: str, model: Path, *, route: str, dtype: str, ranks: int, on_top: bool, more: Sequence[str]
) -> list[str]:
    """Of the server's program, but for its address. `on_top`: adapters shall be tried on top of the route's versions.
    `more`: the user's, which replace ours of the same name."""
    engine = ENGINES[name]
    found = [engine.model, str(model), engine.longest, str(min(MOST_TOKENS, longest_context(model))), *engine.flags]
    found += engine.by_route.get(route, ())
    if on_top and route == "disk":  # others refuse a server with adapters
        found += engine.adapters
    if dtype != "auto":
        found += ["--dtype", dtype]
    if ranks > 1:
        found += [engine.ranks, str(ranks)]
    return [*found, *more]


@contextmanager
def started(name: str, arguments: Sequence[str], log: Path, *, timeout_s: float) -> Iterator[str]:
    """The URL of a server, whose processes, files and shared memory are gone after the block, and if this process is
    killed. Raises BackendUnavailable if it does not answer within `timeout_s`."""
    module = ENGINES[name].module
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ConfigError(f"--engine {name}: the package {module.partition('.')[0]} is not installed here")
    with Leftovers() as leftovers, reserve_port(LOOPBACK) as reserved:
        port = reserved.getsockname()[1]
        command = [sys.executable, "-m", f"{PACKAGE}.support.server_process", module, *arguments]
        with log.open("wb") as to:
            server = subprocess.Popen(
                [*command, "--host", LOOPBACK, "--port", str(port)],
                env=ENVIRONMENT | os.environ | leftovers.environment,
                stdout=to,
                stderr=to,
                start_new_session=True,
            )
        url, has_started = f"http://{LOOPBACK}:{port}", False
        try:
            with leftovers.finding_shared_memory(), _stopped_after_an_error(server):
                _await(server, url, log, name, timeout_s)
            has_started = True
            yield url
        finally:
            _end(server, patience_s=ENDS_WITHIN_S if has_started else 0.0)


@contextmanager
def _stopped_after_an_error(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """A server that is told to end while it starts goes on for a while: it shall make no more shared memory, and keep
    what it has mapped until that has been found."""
    try:
        yield
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGSTOP)
        raise


def _await(server: subprocess.Popen[bytes], url: str, log: Path, name: str, timeout_s: float) -> None:
    asked, deadline = HttpServer(url, timeout_s=timeout_s), time.monotonic() + timeout_s
    while not asked.is_healthy():
        if (code := server.poll()) is not None:
            raise BackendUnavailable(f"{name} ended with exit code {code}: {_said(log)}")
        if time.monotonic() > deadline:
            raise BackendUnavailable(f"{name} does not answer after {timeout_s:g} s: {_said(log)}")
        time.sleep(POLL_S)


def _said(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if "rror" in line] or lines
    return " | ".join(errors[-SHOWN_LINES:])


def _end(server: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Told to end, a server removes its shared memory; one that does not end, or this process told again, is killed."""
    try:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(patience_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
