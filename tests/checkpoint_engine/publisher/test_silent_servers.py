"""Servers that accept connections and do not answer: no push waits for one beyond the deadlines of its phases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint_engine.publisher.recorded import URL, RecordedPublisher
from tests.http_server import http_server
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import TransportTimeout
from verl.checkpoint_engine.parameter_server.writers import Writer
from verl.checkpoint_engine.publisher.endpoint_replica import EndpointReplica, Server, VLLMServer
from verl.checkpoint_engine.publisher.reports import ReportsHere
from verl.checkpoint_engine.publisher.sglang_endpoint import SGLangEndpoint

SHORT_S = 0.2
LONG_S = 600.0
"""A test that waits for this has failed."""


@pytest.fixture
def silent() -> Iterator[str]:
    ends = threading.Event()

    def answer(*_: object) -> None:
        ends.wait(LONG_S)

    with http_server(answer) as url:
        yield url
        ends.set()


def vllm(url: str, tmp_path: Path) -> Server:
    return VLLMServer(url, Writer.here("test"), timeout_s=LONG_S)


def sglang(url: str, tmp_path: Path) -> Server:
    return SGLangEndpoint(
        url, timeout_s=LONG_S, check_engine="off", pause_mode="keep", reports=ReportsHere(tmp_path), host=0, who="test"
    )


@pytest.mark.parametrize("engine", [vllm, sglang])
async def test_a_silent_server_is_left_after_an_aborted_push(
    engine: Callable[[str, Path], Server], silent: str, tmp_path: Path
):
    config = CheckpointEngineConfig.from_mapping({"deadlines": {"resume_s": SHORT_S}})
    replica = EndpointReplica(silent, 0, config, timeout_s=LONG_S, reports=ReportsHere(tmp_path))
    replica._server, replica._is_paused = engine(silent, tmp_path), True
    with pytest.raises(TransportTimeout, match="does not answer"):
        await asyncio.wait_for(replica.go_on(3), LONG_S / 10)
    for thread in threading.enumerate():
        if thread.name == "apart-go_on":  # it ends, and sends nothing later
            thread.join(LONG_S / 10)
            assert not thread.is_alive()


async def never() -> str:
    await asyncio.sleep(LONG_S)
    return ""


@pytest.fixture
def publisher(shm: Path) -> Iterator[RecordedPublisher]:
    with RecordedPublisher({"a": torch.ones(4)}) as publisher:
        yield publisher


@pytest.fixture
def fall_silent(publisher: RecordedPublisher, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the server answer one question no more; a push then waits for it for SHORT_S."""
    short = CheckpointEngineConfig.from_mapping({"deadlines": {"prepare_s": SHORT_S}})

    def fall(question: str) -> None:
        monkeypatch.setattr(publisher.server, question, lambda *_: never())
        monkeypatch.setattr(publisher, "_settings", short)

    return fall


@pytest.mark.parametrize("question", ["check", "claim"])
def test_a_push_ends_by_name_if_a_new_server_is_silent(question, publisher, fall_silent, monkeypatch):
    fall_silent(question)
    with pytest.raises(TransportTimeout, match=rf"{URL}\] no answer within 0.2 s"):
        publisher.push(1)
    monkeypatch.undo()
    publisher.push(1)


def test_a_push_says_which_known_server_fell_silent(publisher, fall_silent, caplog):
    publisher.push(1)
    fall_silent("claim")
    publisher.push(2)
    assert f"{URL} does not answer: no answer within 0.2 s" in caplog.text
