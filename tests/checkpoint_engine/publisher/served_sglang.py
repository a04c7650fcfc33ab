"""SGLang's own server, which has its Python part on CPU and stand-ins for its kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.free_ports import free_port
from tests.sglang_on_cpu import PROGRAM
from tests.weight_sync.greedy import NUM_TOKENS, PROMPTS
from verl.checkpoint_engine.engines.leftovers import Leftovers, shared_memory_of
from verl.checkpoint_engine.parameter_server.http_server import HttpServer
from verl.checkpoint_engine.publisher.sglang_endpoint import FLAG

START_S = 600.0
ON_CPU = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
    "--disable-cuda-graph --disable-overlap-schedule --sleep-on-idle --max-total-tokens 4096"
)


FAULTS = "tests.checkpoint_engine.publisher.sglang_faults.load"
"""A loader that loads nothing, and changes how others load."""


class ServedSGLang(HttpServer):
    def greedy_tokens(self, prompts: Sequence[Sequence[int]] = PROMPTS, count: int = NUM_TOKENS) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        bodies = [{"input_ids": list(prompt), "sampling_params": sampling} for prompt in prompts]
        return [self.call("POST", "/generate", body)["output_ids"] for body in bodies]

    @contextmanager
    def begins_unlike(
        self, other: Sequence[int], prompt: Sequence[int], count: int
    ) -> Iterator[Callable[[], list[int]]]:
        """Yields, once its tokens are not those of `other`, what waits for all of them."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/generate", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
            answers = _output_ids(answer)
            next(ids for ids in answers if ids != [*other[: len(ids)]])
            yield lambda: [*answers][-1]

    def version(self) -> str:
        found: str = self.call("GET", "/model_info")["weight_version"]
        return found


def _output_ids(answer: Iterable[bytes]) -> Iterator[list[int]]:
    """So far, in each part of a stream."""
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))["output_ids"]


def _is_there(served: ServedSGLang) -> bool:
    try:
        return served.call("GET", "/model_info", timeout_s=60) is not None
    except Exception:  # noqa: BLE001 - not yet
        return False


@contextmanager
def served_sglang(directory: Path, log: Path) -> Iterator[ServedSGLang]:
    """A server with dummy weights in float32 for the model in `directory`. It writes to `log`."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", directory, "--skip-tokenizer-init"]
    command += ["--load-format", "dummy", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command += [*ON_CPU.split(), *FLAG.split(), FAULTS]
    environment = os.environ | PROGRAM | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    kept = Leftovers()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment | kept.environment, start_new_session=True
        )
    served = ServedSGLang(f"http://127.0.0.1:{port}", timeout_s=300)
    leftovers: set[Path] = set()
    try:
        deadline = time.monotonic() + START_S
        while not _is_there(served):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        leftovers = shared_memory_of(process.pid)
        yield served
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=60)
        for one in alive:
            one.kill()
        process.wait()
        for path in leftovers:
            path.unlink(missing_ok=True)
        kept.remove()
