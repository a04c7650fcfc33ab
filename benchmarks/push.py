"""How long a push into a running vLLM server takes, next to vLLM's own reload from the page cache.

    python -m benchmarks.push --size-mib 256

The server is real and its model, a Qwen2 of random values in bfloat16, is made on the spot. Each round changes every
tensor and pushes; then writes the model's files, as a loop without a publisher has to, and has vLLM reload them,
paused as a push pauses it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.command import program, progress
from benchmarks.free_ports import free_port
from benchmarks.random_model import MIN_MIB, make_random_model
from benchmarks.report import Report, table
from verl.checkpoint_engine import WeightPublisher
from verl.checkpoint_engine.engines.leftovers import Leftovers
from verl.checkpoint_engine.parameter_server.endpoints import ENGINE_NAME, Endpoint
from verl.utils.config import option

START_S = 300.0
REQUEST_S = 300.0
ENDS_WITHIN_S = 30.0
WARM_UP = 2
"""Rounds before the measured ones: each of the two slots has been written and mapped once."""
WAYS = PUSH, FILES, RELOAD = ("push", "write the files", "reload_weights")


@dataclass(frozen=True, kw_only=True)
class Settings:
    size_mib: float = option(256.0, "of the model", least=MIN_MIB)
    repeats: int = option(5, "rounds that are measured", least=1)


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """`vllm serve MODEL` as a user starts it, on one core; its URL. Raises ValueError with the end of its log."""
    address, port = "127.0.0.1", free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
    command += ["--host", address, "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", "100000000"]
    command += ["--weight-transfer-config", json.dumps({"backend": ENGINE_NAME})]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    endpoint = Endpoint(f"http://{address}:{port}", timeout_s=REQUEST_S)
    with Leftovers() as kept:
        with log.open("w") as file:
            server = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment | dict(os.environ) | kept.environment
            )
        try:
            deadline = time.monotonic() + START_S
            with kept.finding_shared_memory():
                while not endpoint.is_healthy():
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise ValueError(f"vLLM does not serve:\n{log.read_text()[-2000:]}")
                    time.sleep(0.2)
            yield endpoint.url
        finally:
            server.terminate()
            try:
                server.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def measure(settings: Settings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="verl-push-") as scratch:
        progress(f"a model of {settings.size_mib:g} MiB, and a vLLM server with it")
        model = make_random_model(Path(scratch) / "model", settings.size_mib)
        (file,) = model.glob("*.safetensors")
        tensors = load_file(file)
        with served(model, Path(scratch) / "vllm.log") as url, WeightPublisher(tensors, [url]) as publisher:
            rounds = [
                _round(publisher, Endpoint(url, timeout_s=REQUEST_S), url, tensors, file, number)
                for number in range(WARM_UP + settings.repeats)
            ]
    measured = rounds[WARM_UP:]
    return {
        "mib": sum(tensor.nbytes for tensor in tensors.values()) / 2**20,
        "tensors": len(tensors),
        "ways": {way: {key: median(one[way][key] for one in measured) for key in measured[0][way]} for way in WAYS},
        "ratio_to_reload": median(one[PUSH]["seconds"] / one[RELOAD]["seconds"] for one in measured),
    }


def _round(
    publisher: WeightPublisher,
    endpoint: Endpoint,
    url: str,
    tensors: dict[str, torch.Tensor],
    file: Path,
    version: int,
) -> dict[str, dict[str, float]]:
    for tensor in tensors.values():
        tensor.mul_(-1)
    began = time.perf_counter()
    report = publisher.push(version)
    pushed = time.perf_counter()
    save_file(tensors, file, metadata={"format": "pt"})
    written = time.perf_counter()
    _reload(endpoint, url)
    reload_s = time.perf_counter() - written
    progress(f"push {pushed - began:.2f} s; files {written - pushed:.2f} s, reload_weights {reload_s:.2f} s")
    return {
        PUSH: {"seconds": pushed - began, "paused_s": report.paused_s[url], **report.phase_s},
        FILES: {"seconds": written - pushed, "paused_s": 0.0},
        RELOAD: {"seconds": reload_s, "paused_s": reload_s},
    }


def _reload(endpoint: Endpoint, url: str) -> None:
    endpoint.pause("abort")
    body = json.dumps({"method": "reload_weights"}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        answer.read()
    endpoint.resume()


def report(result: dict[str, Any]) -> Report:
    title = f"{result['mib']:.0f} MiB in {result['tensors']} tensors, medians of {result['settings']['repeats']}"
    rows = [{"way": way, **numbers} for way, numbers in result["ways"].items()]
    phases = {name: seconds for name, seconds in result["ways"][PUSH].items() if name not in ("seconds", "paused_s")}
    return Report(
        [
            table(title, {"": "{way}", "seconds": "{seconds:.3f}", "paused": "{paused_s:.3f}"}, rows),
            "of the push: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items()),
            f"a push takes {result['ratio_to_reload']:.2f} times as long as reload_weights",
        ]
    )


main = program("push", __doc__, Settings, measure, report, plots=False)
if __name__ == "__main__":
    sys.exit(main())
