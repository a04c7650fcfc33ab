"""What processes that are killed leave in shared memory: it is found while they live, and removed."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import psutil

from tests.checkpoint_engine.fakes import soon
from verl.workers.rollout.vllm.leftovers import LOOK_EVERY_S, SHM_DIR, Leftovers, shared_memory_of


def own(pipe: Connection) -> None:
    context = multiprocessing.get_context("spawn")
    memory, lock = SharedMemory(create=True, size=4096), context.Lock()
    pipe.send({memory.name, f"sem.{lock._semlock.name.removeprefix('/')}"})
    pipe.poll(60)  # until the other end is closed
    memory.unlink()


def test_memory_and_semaphores_of_a_child_are_found_and_those_of_others_are_not():
    context = multiprocessing.get_context("spawn")
    mine, pipes = SharedMemory(create=True, size=4096), context.Pipe()
    child = context.Process(target=own, args=(pipes[1],))
    child.start()
    pipes[1].close()  # a child that fails ends the test
    try:
        theirs = pipes[0].recv()
        found = shared_memory_of(os.getpid())
    finally:
        pipes[0].close()
        child.join()
        mine.unlink()
    assert {SHM_DIR / name for name in theirs} <= found
    assert SHM_DIR / mine.name not in found


def start_and_never_finish(pipe: Connection) -> None:
    with Leftovers().finding_shared_memory():
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=own, args=(pipe,))
        child.start()
        child.join()


def test_memory_of_an_engine_that_is_killed_while_it_starts_is_removed():
    context = multiprocessing.get_context("spawn")
    pipes = context.Pipe()
    server = context.Process(target=start_and_never_finish, args=(pipes[1],))
    server.start()
    pipes[1].close()
    made = {SHM_DIR / name for name in pipes[0].recv()}
    time.sleep(30 * LOOK_EVERY_S)  # it has looked by then, on a busy machine, too
    for process in (*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)):
        process.kill()  # with those that would clean up after Python's own memory
    server.join()
    assert soon(lambda: not any(path.exists() for path in made)), made
