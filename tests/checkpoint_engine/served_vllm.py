"""A plain vLLM server in processes of its own, with the arguments of a user, dummy weights and our plugin."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.free_ports import free_port
from tests.warm_workers import Fork, WarmWorkers
from tests.weight_sync.greedy import NUM_TOKENS, PROMPTS
from tests.weight_sync.replicas import served_weights_file
from verl.checkpoint_engine.engines.leftovers import Leftovers, shared_memory_of
from verl.checkpoint_engine.parameter_server.endpoints import ENGINE_NAME, Endpoint

START_TIMEOUT_S = 600.0


class ServedVLLM:
    def __init__(self, url: str, model: Path, served: Path, temporary: Path | None = None) -> None:
        """`temporary`: where its files and sockets are."""
        self.url, self.temporary = url, temporary
        self._model = model
        self._served = served

    def call(self, path: str, body: Any = None) -> Any:
        """POST, with a body or without."""
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read() or b"null")

    def greedy_tokens(self) -> list[list[int]]:
        """What it says to PROMPTS."""
        body = {"model": str(self._model), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answers = [
            self.call("/v1/completions", body | {"prompt": prompt, "return_token_ids": True}) for prompt in PROMPTS
        ]
        return [answer["choices"][0]["token_ids"] for answer in answers]

    def log_probs(self, prompt: list[int]) -> list[float]:
        """Of every token of `prompt` but the first."""
        body = {"model": str(self._model), "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        (answer,) = self.call("/v1/completions", body)["choices"]
        places = zip(answer["prompt_logprobs"][1:], prompt[1:], strict=True)
        return [place[str(token)]["logprob"] for place, token in places]

    def version(self) -> str:
        """Of the weights that it serves."""
        return Endpoint(self.url, timeout_s=300).version()

    def weights(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """What the worker computes with, by vLLM's name of the parameter."""
        self.call("/collective_rpc", {"method": "write_served_weights", "args": ["now"]})
        found: dict[str, torch.Tensor] = torch.load(served_weights_file(self._served, "now", rank))
        return found


@contextmanager
def served_vllm(
    model: Path, directory: Path, warm: WarmWorkers, *flags_too: str, ranks: int = 1
) -> Iterator[ServedVLLM]:
    """`vllm serve MODEL --load-format dummy ...`: the command itself does not start in vLLM's CPU distribution."""
    port, served = free_port(), directory / "served"
    served.mkdir()
    arguments = {
        "model": model,
        "load-format": "dummy",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 256,
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": 10**8,
        "weight-transfer-config": json.dumps({"backend": ENGINE_NAME}),
        "worker-extension-cls": "tests.weight_sync.inspected_engine.ServedWeights",
        "tensor-parallel-size": ranks,
        "additional-config": json.dumps({"served_weights": str(served)}),
    }
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    with Leftovers() as kept:
        environment = os.environ | {
            **kept.environment,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join("0" for _ in range(ranks)),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        with (directory / "vllm.log").open("wb") as log:
            server = Fork(
                warm,
                "vllm.entrypoints.openai.api_server",
                ["--enforce-eager", *flags, *flags_too],
                env=environment,
                stdout=log,
                stderr=log,
                spawns=True,
            )
        memory: set[Path] = set()
        try:
            url = f"http://127.0.0.1:{port}"
            _await_health(server, url, directory / "vllm.log")
            memory = shared_memory_of(server.pid)
            yield ServedVLLM(url, model, served, kept.directory)
        finally:
            # Its whole family: told to end, it may take half a minute for connections that are open.
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            for path in memory:
                path.unlink(missing_ok=True)


def _await_health(server: Fork, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url + "/health", timeout=60):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"vLLM did not start:\n{log.read_text(errors='replace')[-5000:]}")
