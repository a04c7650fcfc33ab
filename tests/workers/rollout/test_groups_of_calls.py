"""Calls of a server are answered in every group, also where the threads of its event loops start late."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray

from verl.workers.rollout.server import CONCURRENCY

LATE = "VERL_TEST_LATE_THREADS"

if LATE in os.environ:  # in the server's process, which imports this before Ray starts the threads
    run = threading.Thread.run

    def run_late(thread: threading.Thread) -> None:
        time.sleep(0.2)
        run(thread)

    threading.Thread.run = run_late  # type: ignore[method-assign, assignment]


class Server:
    @ray.method(concurrency_group="generate")
    async def generate(self) -> str:
        return threading.current_thread().name

    async def health(self) -> str:
        return threading.current_thread().name


def test_every_group_of_a_server_has_its_loop_though_threads_start_late(ray_cluster: None) -> None:
    """With a second named group Ray runs the loop of that one in both threads, and `generate` is never answered."""
    actor: Any = ray.remote(**CONCURRENCY)(Server)
    server = actor.options(num_cpus=0.1, runtime_env={"env_vars": {LATE: "1"}}).remote()
    try:
        answers = ray.get([server.generate.remote(), server.health.remote()], timeout=300)
        assert answers == ["AsyncIO Thread: generate", "AsyncIO Thread: default"]
    finally:
        ray.kill(server)
