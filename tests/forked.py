"""Processes of tests that are forked from a server which has imported, once, what any of them needs.

`multiprocessing` has one such server for a test process. It imports what was asked for until the first process starts:
ranks of a trainer imported 3.3 s of processor time each where that first process was a member of a sync.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

IMPORTED = (
    "tests.checkpoint_engine.member_processes",
    "tests.checkpoint_engine.parameter_server.rank_processes",
    "benchmarks.node_process",
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
