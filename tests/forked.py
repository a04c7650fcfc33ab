"""Processes of tests that are forked from a server which has imported, once, what any of them needs.

`multiprocessing` has one such server for a test process. It imports what was asked for until the first process starts:
ranks of a trainer imported 3.3 s of processor time each where that first process was a member of a sync.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

IMPORTED = (
    "tests.checkpoint_engine.member_processes",
    "tests.checkpoint_engine.parameter_server.rank_processes",
    "benchmarks.fleet",
    "verl.checkpoint_engine.backends.collective",
    "verl.workers.engine.fsdp.fsdp1",
    "verl.workers.engine.fsdp.fsdp2",
    "verl.workers.engine.megatron.engine",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)


def start_server() -> None:
    """Whoever starts processes without `start` afterwards has it, too."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))
    forkserver.ensure_running()


def start(target: Callable[..., None], *arguments: Any, name: str | None = None) -> tuple[BaseProcess, Connection]:
    """A process that calls `target(pipe, *arguments)`, and the other end of the pipe. It ends with this process."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def run(program: Callable[..., object], *arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What `program(*arguments)` writes as a program of its own, in the directory `cwd`, and its exit code."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, name) for name in ("stdout", "stderr")]
        process, pipe = start(_run, files, cwd or Path.cwd(), program, arguments)
        with pipe:
            process.join()
        said = [file.read_text() for file in files]
    return subprocess.CompletedProcess([program.__qualname__, *arguments], process.exitcode or 0, *said)


def _run(
    pipe: Connection, files: list[Path], cwd: Path, program: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    pipe.close()
    for number, file in enumerate(files, start=1):
        with file.open("w") as output:
            os.dup2(output.fileno(), number)
    os.chdir(cwd)
    program(*arguments)
