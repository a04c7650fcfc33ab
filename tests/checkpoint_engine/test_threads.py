"""How many threads work on large memory."""

from __future__ import annotations

import os

import pytest

from verl.checkpoint_engine.memory.threads import memory_threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (8, 4), (32, 4), (64, 8), (192, 24)])
def test_a_large_host_works_on_memory_with_more_threads(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert memory_threads() == threads
