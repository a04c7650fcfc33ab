"""What processes that are killed leave in shared memory: it is found while they live, and removed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from tests.checkpoint_engine.fakes import soon
from verl.checkpoint_engine.engines.leftovers import (
    PREFIX,
    SHM_DIR,
    Leftovers,
    shared_memory_of,
)
from verl.checkpoint_engine.memory.janitor import YOUNG_S, sweep

OWNED = 2


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
    leftovers, told = Leftovers(), []
    tell, leftovers._janitor.watch = leftovers._janitor.watch, lambda path: told.append(tell(path))
    with leftovers.finding_shared_memory():
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=own, args=(pipe,))
        child.start()
        assert soon(lambda: len(told) == OWNED)
        pipe.send("the janitor knows")
        child.join()


def test_memory_of_an_engine_that_is_killed_while_it_starts_is_removed():
    context = multiprocessing.get_context("spawn")
    pipes = context.Pipe()
    server = context.Process(target=start_and_never_finish, args=(pipes[1],))
    server.start()
    pipes[1].close()
    made = {SHM_DIR / name for name in pipes[0].recv()}
    assert len(made) == OWNED
    assert pipes[0].recv() == "the janitor knows"
    for process in (*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)):
        process.kill()  # with those that would clean up after Python's own memory
    server.join()
    assert soon(lambda: not any(path.exists() for path in made)), made


def test_sockets_of_an_engine_are_in_a_short_directory_whatever_tmpdir_is(monkeypatch, tmp_path):
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with Leftovers() as leftovers, socket.socket(socket.AF_UNIX) as vllm:
        vllm.bind(str(leftovers.directory / str(uuid.uuid4())))


def leave_a_temporary_file(pipe: Connection) -> None:
    handle, path = tempfile.mkstemp(prefix="vllm_dist_")
    os.close(handle)
    pipe.send(path)
    pipe.poll(60)


def start_with_temporary_files(pipe: Connection, directory: str, ends: str) -> None:
    tempfile.tempdir = directory
    leftovers = Leftovers()
    context = multiprocessing.get_context("spawn")
    with leftovers.taking_temporary_files():
        handle, own = tempfile.mkstemp(prefix="vllm_dist_")
        os.close(handle)
        inner = context.Pipe()
        child = context.Process(target=leave_a_temporary_file, args=(inner[1],))
        child.start()
        pipe.send([own, inner[0].recv(), str(leftovers.directory), leftovers._janitor.pid])
    assert tempfile.gettempdir() == directory
    pipe.poll(60)
    child.kill()
    if ends == "shut down":
        leftovers.remove()


@pytest.mark.parametrize("ends", ["shut down", "exits", "is killed", "is killed with its janitor"])
def test_temporary_files_of_an_engine_go_with_it(tmp_path, ends):
    context = multiprocessing.get_context("spawn")
    pipes = context.Pipe()
    server = context.Process(target=start_with_temporary_files, args=(pipes[1], str(tmp_path), ends))
    server.start()
    pipes[1].close()
    *made, directory, janitor = pipes[0].recv()
    assert all(Path(path).parent == Path(directory) for path in made)
    if ends.startswith("is killed"):
        children = psutil.Process(server.pid).children(recursive=True)
        if ends == "is killed with its janitor":
            psutil.Process(janitor).kill()
        server.kill()
        for child in children:
            child.kill()
    pipes[0].close()
    server.join()
    if ends == "is killed with its janitor":
        long_ago = time.time() - 2 * YOUNG_S
        os.utime(directory, (long_ago, long_ago))
        sweep(tmp_path, PREFIX)
    assert soon(lambda: not list(tmp_path.iterdir())), list(tmp_path.rglob("*"))
