"""What processes that are killed leave in shared memory, found while they live."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

from verl.workers.rollout.vllm.leftovers import SHM_DIR, shared_memory_of


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
