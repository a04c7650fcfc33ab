"""What a publisher is given, and how it ends: what is wrong is refused at the door, and nobody waits for the dead."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.checkpoint_engine.fakes import arenas_in, soon
from tests.checkpoint_engine.publisher.recorded import RecordedPublisher
from tests.checkpoint_engine.stand_in_vllm import stand_in
from verl.checkpoint_engine import CheckpointEngineError, ConfigError, SyncAborted, WeightPublisher
from verl.checkpoint_engine.memory.janitor import Janitor
from verl.checkpoint_engine.parameter_server.rescue import PREFIX
from verl.checkpoint_engine.parameter_server.writers import LEASE_S, Ledger


@pytest.mark.parametrize("version", [np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3])])
def test_integers_of_numpy_and_torch_are_versions(version: Any, shm: Path):
    with RecordedPublisher({"w": torch.ones(3)}) as publisher:
        assert publisher.push(version).version == 3
        assert publisher.push_async(version).result().version == 3


@pytest.mark.parametrize(
    "version",
    [-1, 2**63, 1.0, "1", None, True, np.bool_(True), np.float32(1), torch.tensor(True), torch.tensor(1.5)]
    + [torch.tensor([1, 2]), np.array([1]), np.uint64(2**63), float("nan")],
)
def test_what_is_no_version_is_refused_before_anything_happens(version: Any, shm: Path):
    with RecordedPublisher({"w": torch.ones(3)}) as publisher:
        with pytest.raises(ConfigError, match=r"is no integer of 0 to 2\*\*63 - 1"):
            publisher.push(version)
        with pytest.raises(ConfigError, match="is no integer of 0"):
            publisher.push_async(version).result()
        assert (publisher.server.log, arenas_in(shm)) == ([], [])
        assert publisher.push(2**63 - 1).version == 2**63 - 1


def test_a_version_goes_back_if_that_is_meant_alone(shm: Path):
    with RecordedPublisher({"w": torch.ones(3)}) as publisher:
        publisher.push(5)
        publisher.push(5)
        with pytest.raises(ConfigError, match=r"version 4 is older than 5, .* allow_older=True"):
            publisher.push(4)
        assert publisher.server.version == 5
        publisher.push(4, allow_older=True)
        assert publisher.server.version == 4
        publisher.push_async(3, allow_older=True).result()
        assert publisher.server.version == 3


def test_a_push_after_close_says_so(shm: Path):
    publisher = RecordedPublisher({"w": torch.ones(3)})
    publisher.close()
    for push in (publisher.push, publisher.push_async):
        with pytest.raises(ConfigError, match="the publisher is closed: make a new one"):
            push(1)


def test_a_push_while_another_thread_pushes_is_refused_and_harms_none(shm: Path):
    begun, goes_on = threading.Event(), threading.Event()

    def holds(path: str) -> None:
        if path == "/pause":
            begun.set()
            assert goes_on.wait(60)

    with stand_in(1) as (vllm, url), WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
        vllm.before = holds
        thread = threading.Thread(target=publisher.push, args=(1,))
        thread.start()
        assert begun.wait(60)
        for push in (publisher.push, publisher.push_async):
            with pytest.raises(ConfigError, match="a push is active in another thread: push from one thread"):
                push(2)
        goes_on.set()
        thread.join()
        assert vllm.version == "1"
        assert publisher.push(2).version == 2


def test_between_pushes_a_server_stays_that_of_its_publisher(shm: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.checkpoint_engine.publisher.publisher.LEASE_S", 0.03)  # how often it is renewed
    now = [0.0]
    with stand_in(1) as (vllm, url), WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
        vllm.workers[0].ledger = Ledger(lambda: now[0])
        publisher.push(1)
        (holder,) = vllm.holders
        now[0] += LEASE_S
        assert soon(lambda: vllm.holders == {holder})


def test_a_publisher_that_nobody_has_any_more_keeps_no_server(shm: Path):
    """Its claim is renewed by what knows it as long as it is there."""
    with stand_in(1) as (_, url):
        publisher = WeightPublisher({"w": torch.ones(3)}, [url])
        publisher.push(1)
        it = weakref.ref(publisher)
        del publisher
        gc.collect()
        assert it() is None


def test_a_fork_is_told_to_make_a_publisher_of_its_own_and_ends_that_of_its_parent_in_nothing(shm: Path):
    def said() -> list[str]:
        found = []
        for push in (publisher.push, publisher.push_async):
            with pytest.raises(ConfigError, match="of which this one, .*, is a fork: make one here") as caught:
                push(1)
            found.append(str(caught.value))
        publisher.close()
        return found

    with RecordedPublisher({"w": torch.ones(3)}) as publisher:
        publisher.push(0)
        read, write = os.pipe()
        if not (child := os.fork()):
            with suppress(BaseException):
                os.write(write, "\n".join(said()).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            assert file.read().count(f"made by process {os.getpid()}, ") == 2
        assert os.waitpid(child, 0) == (child, 0)
        assert publisher.push(1).version == 1
        assert arenas_in(shm)


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:8000",
        "localhost",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://me:word@host",
        "http://host/?a=b",
    ],
)
def test_an_endpoint_that_is_no_url_is_refused_as_on_the_command_line(endpoint: str):
    with pytest.raises(ConfigError, match=r"is not a URL like http://127.0.0.1:8000"):
        WeightPublisher({"w": torch.ones(3)}, [endpoint])


@pytest.mark.parametrize("endpoints", [[5], [None], [b"http://host"], b"http://host", [Path("http://a")], None, 8000])
def test_endpoints_that_are_no_text_are_refused(endpoints: Any):
    with pytest.raises(ConfigError, match="endpoint(s is a list of URLs| is a URL)"):
        WeightPublisher({"w": torch.ones(3)}, endpoints)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sent", [None, "bfloat16"])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, held: str, sent: str | None, shm: Path):
    model = nn.Linear(4, 3).to(getattr(torch, held))
    with RecordedPublisher(model, dtype=sent, config={"retries": 3}) as publisher:
        publisher.push(1)
        with torch.no_grad():
            model.bias[1] = value
        for push in (publisher.push, lambda version: publisher.push_async(version).result()):
            with pytest.raises(SyncAborted, match=r"bias has .*allow_nonfinite=True") as caught:
                push(2)
            assert isinstance(caught.value.__cause__, ConfigError)
        assert (publisher.server.version, publisher.server.paused) == (1, False)
    with RecordedPublisher(model, dtype=sent, allow_nonfinite=True) as publisher:
        publisher.push(2)
        assert torch.equal(publisher.server.weights["bias"].isfinite(), torch.tensor([True, False, True]))


def test_what_is_too_large_for_the_dtype_that_is_sent_is_refused_by_name(shm: Path):
    with (
        RecordedPublisher({"w": torch.tensor([1e6, -1.0])}, dtype="float16") as publisher,
        pytest.raises(SyncAborted, match=r"w has values of -1 to 1e\+06, which is not finite in float16"),
    ):
        publisher.push(1)


# --- the end ----------------------------------------------------------------------------------------------------------


@contextmanager
def forked() -> Iterator[int]:
    """A fork of this process that lives on, as a DataLoader's worker does."""
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_janitor_does_not_wait_for_forks_of_its_process(tmp_path: Path):
    directory = tmp_path / "arena"
    directory.mkdir()
    janitor = Janitor(directory)
    with forked():
        janitor.close()
        assert not directory.exists()


class Silent:
    """Takes connections, and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked = threading.Event()
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                self._taken.append(self._socket.accept()[0])
            except OSError:
                return
            self.asked.set()

    def close(self) -> None:
        for one in (self._socket, *self._taken):
            one.close()


def test_a_publisher_closes_though_its_server_never_answers(shm: Path):
    server = Silent()
    publisher = WeightPublisher({"w": torch.ones(3)}, [server.url])
    pushing = threading.Thread(target=publisher.push_async, args=(1,), daemon=True)
    pushing.start()
    assert server.asked.wait(60)
    before = threading.active_count()
    publisher.close()
    assert arenas_in(shm) == []
    assert not pushing.is_alive() or soon(lambda: not pushing.is_alive())
    assert threading.active_count() <= before
    server.close()


@pytest.mark.parametrize("step", ["pause", "activate", "resume"])
def test_closing_gives_up_a_push_whose_server_hangs(step: str, shm: Path):
    publisher = RecordedPublisher({"w": torch.ones(3)})
    reached = threading.Event()

    def hang(now: str) -> Any:
        if now == step:
            reached.set()
            return asyncio.Event().wait()
        return None

    publisher.server.fail = hang
    pending = publisher.push_async(1)
    assert reached.wait(60)
    publisher.close()
    assert pending.done()
    assert arenas_in(shm) == []


class Hurried(WeightPublisher):
    """Whose clock is past the end of every wait of `close`."""

    def __init__(self, *arguments: Any) -> None:
        self.waits_s: list[float] = []
        super().__init__(*arguments)

    def _ends_within(self, timeout_s: float, work: Future[Any]) -> bool:
        self.waits_s.append(timeout_s)
        return super()._ends_within(0, work)


@pytest.mark.parametrize(
    "silent_at", ["/get_world_size", "/collective_rpc", "/pause", "/update_weights", "/finish_weight_update", "/resume"]
)
def test_what_closing_waits_for_is_less_than_five_seconds_whatever_a_server_does_not_answer(silent_at: str, shm: Path):
    asked, goes_on = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        if path == silent_at:
            asked.set()
            goes_on.wait()

    with stand_in(1) as (vllm, url):
        vllm.before = hang
        publisher = Hurried({"w": torch.ones(3)}, [url])
        pushing = threading.Thread(target=lambda: suppressed(publisher.push_async(1).result), daemon=True)
        pushing.start()
        assert asked.wait(60)
        publisher.close()
        assert 0 < sum(publisher.waits_s) <= 4
        assert not goes_on.is_set()
        goes_on.set()
        pushing.join()
        assert soon(lambda: not vllm.paused and list(shm.glob(f"{PREFIX}*")) == [])


def suppressed(work: Callable[[], object]) -> None:
    with suppress(CheckpointEngineError, asyncio.CancelledError):
        work()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_publisher_closes_while_workers_of_a_data_loader_live_and_its_server_hangs(shm: Path):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        if path == "/update_weights":
            hangs.set()
            goes_on.wait()

    with stand_in(1) as (vllm, url):
        publisher = WeightPublisher({"w": torch.ones(3)}, [url])
        publisher.push(1)
        loader = DataLoader(range(8), num_workers=2, multiprocessing_context="fork", persistent_workers=True)
        batches = iter(loader)
        next(batches)
        workers: list[Any] = batches._workers  # type: ignore[attr-defined]
        vllm.before = hang
        pending = publisher.push_async(2)
        assert hangs.wait(60)
        publisher.close()
        assert not goes_on.is_set()
        assert [worker.is_alive() for worker in workers] == [True, True]
        assert pending.done()
        assert [path for path in arenas_in(shm) if not path.name.startswith(PREFIX)] == []
        goes_on.set()
        assert soon(lambda: not vllm.paused and list(shm.glob("verl-*")) == [])
        assert [worker.is_alive() for worker in workers] == [True, True]
        del batches, loader
