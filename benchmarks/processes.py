"""Processes that a benchmark measures in."""

from __future__ import annotations

import multiprocessing
from typing import Any

IMPORTS = [
    "benchmarks.node_process",
    "benchmarks.parameter_server",
    "benchmarks.peers",
    "benchmarks.raw_gloo",
    "benchmarks.raw_one_sided",
]


def fresh_processes() -> Any:
    """A context of `multiprocessing`: its processes are forked from one that has imported all they need, and no more.

    They begin in milliseconds, where one that imports torch for itself takes three seconds of processor time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context
