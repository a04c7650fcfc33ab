"""A push that is cancelled at any of its awaits leaves a server that serves what it names, and the next push works."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Coroutine, Generator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_engine.fakes import arenas_in, soon
from tests.checkpoint_engine.stand_in_vllm import StandIn, stand_in
from verl.checkpoint_engine import ActivationError, SyncAborted, WeightPublisher

MOST_AWAITS = 1000


class CancelledPublisher(WeightPublisher):
    """Its pushes are cancelled at their await number `at`."""

    at = 0

    async def _transact(self, *arguments: Any) -> Any:
        return await self._counted(super()._transact(*arguments))

    @types.coroutine
    def _counted(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, None, Any]:
        awaits, raised = 0, None
        while True:
            try:
                waited = work.send(None) if raised is None else work.throw(raised)
            except StopIteration as end:
                return end.value
            awaits += 1
            if awaits == self.at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                yield waited
                raised = None
            except BaseException as exc:  # noqa: BLE001 - thrown into what waits
                raised = exc


def serves(vllm: StandIn, pushed: dict[str, float]) -> bool:
    if vllm.paused:
        return False
    return vllm.version == "default" or vllm.weights["w"].tolist() == [pushed[vllm.version]] * 3


@pytest.mark.parametrize("is_first", [True, False], ids=["the first push", "a later push"])
def test_a_push_is_cancelled_at_each_of_its_awaits(is_first: bool, shm: Path):
    pushed: dict[str, float] = {}
    weights, cancelled = torch.zeros(3), []

    def push(publisher: WeightPublisher) -> bool:
        version = len(pushed)
        weights.fill_(version)
        pushed[str(version)] = version
        try:
            publisher.push(version)
        except (asyncio.CancelledError, CancelledError):
            return False
        return True

    with stand_in() as (vllm, url):
        for at in range(1, MOST_AWAITS):
            with CancelledPublisher({"w": weights}, [url]) as publisher:
                assert is_first or push(publisher)
                publisher.at = at
                is_done = push(publisher)
                cancelled.append(at)
                publisher.at = 0
                assert soon(lambda: serves(vllm, pushed)), (at, vllm.paused, vllm.version, vllm.log[-20:])
                assert push(publisher)
                assert (vllm.version, vllm.weights["w"].tolist()) == (str(len(pushed) - 1), [len(pushed) - 1] * 3)
            if is_done:
                break
    assert 10 < len(cancelled) < MOST_AWAITS - 2
    assert arenas_in(shm) == []


@pytest.mark.parametrize("path", ["/pause", "/resume", "/reset_prefix_cache", "/finish_weight_update", "/weight_info"])
@pytest.mark.parametrize("is_first", [True, False], ids=["the first push", "a later push"])
def test_a_server_that_refuses_once_is_not_left_paused(is_first: bool, path: str, shm: Path):
    weights, has_refused = torch.zeros(3), threading.Event()

    def before(asked: str) -> None:
        if asked == path and not has_refused.is_set():
            has_refused.set()
            raise ActivationError("503 Service Unavailable")

    with stand_in() as (vllm, url), WeightPublisher({"w": weights}, [url]) as publisher:
        if not is_first:
            publisher.push(0)
        weights.fill_(1)
        vllm.before = before
        with pytest.raises(SyncAborted):
            publisher.push(1)
        assert has_refused.is_set()
        assert soon(lambda: serves(vllm, {"0": 0.0, "1": 1.0})), vllm.log
        publisher.push(2)
        assert vllm.weights["w"].tolist() == [1] * 3
