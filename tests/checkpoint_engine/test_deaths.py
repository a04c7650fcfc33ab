"""What vLLM's engine core logs of a worker that died becomes a few words."""

from __future__ import annotations

import logging
import multiprocessing
import time

import psutil
import pytest

from tests.checkpoint_engine.fakes import soon
from verl.checkpoint_engine.engines.vllm.deaths import LOGGER, tell_deaths, told_death

SAID = "Worker proc %s died unexpectedly (exit code: %s), shutting down executor."


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_DEATHS", str(tmp_path / "deaths"))
    handlers = list(logging.getLogger(LOGGER).handlers)
    tell_deaths()
    tell_deaths()
    yield tmp_path / "deaths"
    logging.getLogger(LOGGER).handlers[:] = handlers


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "its worker 1 (pid 20) was ended by SIGKILL"),
        (1, "its worker 1 (pid 20) ended with exit code 1"),
        (-99, "its worker 1 (pid 20) was ended by signal 99"),
        (None, "its worker 1 (pid 20) died"),
    ],
)
def test_the_worker_that_died_first_is_named_with_what_ended_it(file, code, words):
    logger = logging.getLogger(LOGGER)
    logger.error("something else failed: %s", "VllmWorker-7")
    assert told_death(file, {}, 2) is None
    logger.error(SAID, "VllmWorker-1", code)
    logger.error(SAID, "VllmWorker-0", -15)
    assert told_death(file, {0: 10, 1: 20}, 2) == words


@pytest.mark.parametrize("is_zombie", [True, False])
def test_a_worker_whose_exit_code_is_not_known_yet_is_asked_for_it(file, is_zombie):
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="VllmWorker-0")
    worker.start()
    worker.kill()
    assert not is_zombie or soon(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE)
    logging.getLogger(LOGGER).error(SAID, worker.name, None)
    assert told_death(file, {}, 1) == "its worker 0 was ended by SIGKILL"


def test_workers_of_data_parallel_ranks_are_counted_over_all_of_them(file, monkeypatch):
    """Each engine core calls its first worker 0, and is called by its rank."""
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP1")
    logging.getLogger(LOGGER).error(SAID, "VllmWorker-1", -11)
    words = "its worker 3 (pid 40, data-parallel rank 1) was ended by SIGSEGV"
    assert told_death(file, {0: 10, 1: 20, 2: 30, 3: 40}, 2) == words


def test_an_engine_without_a_server_of_ours_tells_nobody(monkeypatch):
    monkeypatch.delenv("VERL_ENGINE_DEATHS", raising=False)
    handlers = list(logging.getLogger(LOGGER).handlers)
    tell_deaths()
    assert logging.getLogger(LOGGER).handlers == handlers
