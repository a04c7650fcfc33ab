"""verl's way to pause a server, with a vLLM that has dropped the argument of it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from verl_sync.for_verl.pausing import VERLS_SERVER, take_dropped_argument
from vllm.v1.engine.async_llm import AsyncLLM

Calls = list[dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What vLLM is told, in a process with a server of verl's."""
    told: Calls = []

    async def pause_generation(self: Any, *, mode: str = "abort", clear_cache: bool = True) -> None:
        told.append({"mode": mode, "clear_cache": clear_cache})

    monkeypatch.setattr(AsyncLLM, "pause_generation", pause_generation)
    monkeypatch.setitem(sys.modules, VERLS_SERVER, ModuleType(VERLS_SERVER))
    return told


async def test_requests_in_flight_are_aborted_or_waited_for_as_verl_says(calls: Calls):
    take_dropped_argument()
    take_dropped_argument()
    engine: Any = object.__new__(AsyncLLM)
    await engine.pause_generation(wait_for_inflight_requests=False, clear_cache=False)
    await engine.pause_generation(wait_for_inflight_requests=True)
    await engine.pause_generation(mode="keep")
    assert calls == [
        {"mode": "abort", "clear_cache": False},
        {"mode": "wait", "clear_cache": True},
        {"mode": "keep", "clear_cache": True},
    ]


async def test_a_vllm_without_a_server_of_verls_is_left_as_it_is(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, VERLS_SERVER)
    before = AsyncLLM.pause_generation
    take_dropped_argument()
    assert AsyncLLM.pause_generation is before


async def test_a_vllm_that_still_takes_it_is_left_as_it_is(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    async def takes_it(self: Any, *, mode: str = "abort", wait_for_inflight_requests: bool | None = None) -> None: ...

    monkeypatch.setattr(AsyncLLM, "pause_generation", takes_it)
    take_dropped_argument()
    assert AsyncLLM.pause_generation is takes_it
