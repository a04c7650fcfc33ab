"""Weights on their way from one rank of a ParameterServer into one engine process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.checkpoint_engine.fakes import open_descriptors, soon
from tests.checkpoint_engine.parameter_server import link_process
from tests.checkpoint_engine.parameter_server.link_process import link_sockets
from verl.checkpoint_engine.errors import ActivationError, TransportError, TransportTimeout
from verl.checkpoint_engine.memory.host_memory import KeptMemory, shared_memory
from verl.checkpoint_engine.parameter_server.engine_link import EngineLink
from verl.checkpoint_engine.parameter_server.engine_receiver import IncomingWeights, receive
from verl.checkpoint_engine.parameter_server.records import PackedTensor
from verl.checkpoint_engine.plan.layout import align

HALF_NBYTES = 8192
Weights = dict[str, torch.Tensor]


@pytest.fixture
def link() -> Iterator[EngineLink]:
    with EngineLink("cpu-0", HALF_NBYTES, timeout_s=60) as link:
        yield link


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future]]:
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


@pytest.fixture
def weights() -> Weights:
    generator = torch.Generator().manual_seed(3)
    made: Weights = {
        f"layer-{index}": torch.randn(7 + 50 * (index % 4), 11, generator=generator).to(
            torch.bfloat16 if index % 2 else torch.float32
        )
        for index in range(40)
    }
    return made | {"nothing": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "fills": torch.randn(HALF_NBYTES // 4)}


def put(half: torch.Tensor, names: list[str], weights: Weights) -> list[PackedTensor]:
    """Write tensors into `half` from its start, after what was there has been spoilt."""
    half.fill_(0xAB)
    packed, end = [], 0
    for name in names:
        tensor = weights[name]
        raw = tensor.reshape(-1).view(torch.uint8)
        half[end : end + len(raw)] = raw
        dtype = str(tensor.dtype).removeprefix("torch.")
        packed.append(PackedTensor(name=name, shape=tuple(tensor.shape), dtype=dtype, offset=end, nbytes=len(raw)))
        end += align(len(raw))
    return packed


def buckets(weights: Weights) -> list[list[str]]:
    made: list[list[str]] = [[]]
    end = 0
    for name, tensor in weights.items():
        if end + tensor.nbytes > HALF_NBYTES:
            made.append([])
            end = 0
        made[-1].append(name)
        end += align(tensor.nbytes)
    return made


def serve(link: EngineLink, weights: Weights) -> None:
    for position, names in enumerate(buckets(weights)):
        link.await_free(position % 2, 60)
        link.offer(position % 2, put(link.half(position % 2), names, weights))
    link.finish(60)
    for index in range(2):
        link.half(index).zero_()


def assert_same(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_all_tensors_arrive_and_stay_what_they_were_as_long_as_they_are_held(
    link: EngineLink, weights: Weights, in_thread: Callable[..., Future]
):
    """Halves are overwritten many times meanwhile: an engine may hold a tensor until its layer is complete."""
    assert len(buckets(weights)) > 8
    served = in_thread(serve, link, weights)
    held = dict(receive(link.socket_path, "cpu", 60))
    served.result()
    assert_same(held, weights)


def test_a_view_of_a_part_stays_what_it_was_too(link: EngineLink, weights: Weights, in_thread: Callable[..., Future]):
    served = in_thread(serve, link, weights)
    rows = {
        name: tensor[1:3].T if tensor.dim() == 2 else tensor for name, tensor in receive(link.socket_path, "cpu", 60)
    }
    served.result()
    assert_same(rows, {name: tensor[1:3].T if tensor.dim() == 2 else tensor for name, tensor in weights.items()})


def test_tensors_used_one_at_a_time_arrive_whole(link: EngineLink, weights: Weights, in_thread: Callable[..., Future]):
    served = in_thread(serve, link, weights)
    found = {name: tensor.clone() for name, tensor in receive(link.socket_path, "cpu", 60)}
    served.result()
    assert_same(found, weights)


def test_one_half_is_written_while_the_engine_loads_the_other(link: EngineLink, weights: Weights, in_thread):
    loading, written = threading.Event(), threading.Event()

    def engine() -> list[str]:
        names = []
        for name, _ in receive(link.socket_path, "cpu", 60):
            names.append(name)
            if len(names) == 1:
                loading.set()
                assert written.wait(60)
        return names

    loaded = in_thread(engine)
    link.offer(0, put(link.half(0), ["layer-0"], weights))
    assert loading.wait(60)
    link.offer(1, put(link.half(1), ["layer-1"], weights))
    with pytest.raises(ValueError, match="half 1 has been offered and is not free yet"):
        link.offer(1, [])
    written.set()
    link.finish(60)
    assert loaded.result() == ["layer-0", "layer-1"]


def test_tensors_in_memory_that_is_lent_are_loaded_from_where_they_lie_and_stay_what_they_were(
    weights: Weights, in_thread: Callable[..., Future]
):
    """All offers are made at once: nothing is overwritten before the last is loaded."""
    parts = buckets(weights)
    shared = shared_memory(len(parts) * (HALF_NBYTES + align(1)))
    with EngineLink("cpu-0", HALF_NBYTES, lent=[shared.fd], timeout_s=60) as link:
        for position, names in enumerate(parts):
            offset = position * (HALF_NBYTES + align(1))
            link.offer(2, put(shared.memory[offset : offset + HALF_NBYTES], names, weights), offset)
        loaded = in_thread(lambda: dict(receive(link.socket_path, "cpu", 60)))
        link.await_loaded(60)
        shared.memory.zero_()
        link.finish(60)
        assert_same(loaded.result(), weights)


def test_halves_go_to_the_next_link_once_the_engine_has_accepted_all(weights: Weights, in_thread):
    kept = KeptMemory()
    seen = []
    for _ in range(2):
        with EngineLink("cpu-0", HALF_NBYTES, timeout_s=60, kept=kept) as link:
            served = in_thread(serve, link, weights)
            held = dict(receive(link.socket_path, "cpu", 60))
            served.result()
            seen.append({link.half(index).data_ptr() for index in range(2)})
        assert kept.nbytes == 2 * HALF_NBYTES
        assert_same(held, weights)
    assert seen[0] == seen[1]


def test_halves_of_a_link_whose_engine_stopped_in_the_middle_go_to_nobody(weights: Weights):
    kept = KeptMemory()
    with EngineLink("cpu-0", HALF_NBYTES, timeout_s=60, kept=kept) as link:
        link.offer(0, put(link.half(0), ["layer-0"], weights))
        incoming = receive(link.socket_path, "cpu", 60)
        next(incoming)
        incoming.close()
    assert kept.nbytes == 0


def test_kept_memory_of_another_size_is_let_go_of():
    kept = KeptMemory()
    kept.keep(kept.take(4096, 3))
    assert kept.nbytes == 3 * 4096
    (first,) = kept.take(4096, 1)
    assert kept.nbytes == 2 * 4096
    assert [piece.memory.nbytes for piece in kept.take(8192, 2)] == [8192, 8192]
    assert kept.nbytes == 0
    kept.keep([first])
    kept.release()
    assert kept.nbytes == 0


def test_what_an_engine_holds_when_it_stops_in_the_middle_stays_what_it_was_too(weights: Weights, link: EngineLink):
    link.offer(0, put(link.half(0), ["layer-0", "layer-1"], weights))
    incoming = receive(link.socket_path, "cpu", 60)
    held = dict([next(incoming)])
    incoming.close()
    link.half(0).zero_()
    assert_same(held, {"layer-0": weights["layer-0"]})


def test_no_tensors_at_all_is_a_complete_update(link: EngineLink, in_thread):
    loaded = in_thread(lambda: list(receive(link.socket_path, "cpu", 60)))
    link.finish(60)
    assert loaded.result() == []


def test_what_the_engine_raises_is_told_in_its_words(link: EngineLink, weights: Weights, in_thread):
    def engine() -> None:
        with IncomingWeights(link.socket_path, "cpu", 60) as incoming:
            for name, _ in incoming.tensors():
                raise KeyError(f"there is no {name} in this model")

    loading = in_thread(engine)
    link.offer(0, put(link.half(0), ["layer-0"], weights))
    with pytest.raises(ActivationError, match=r"\[cpu-0\] .*KeyError: 'there is no layer-0 in this model'"):
        link.await_free(0, 60)
    with pytest.raises(ActivationError):  # and from then on
        link.finish(60)
    with pytest.raises(KeyError):
        loading.result()


def test_an_engine_that_refuses_after_the_last_tensor_has_not_accepted(link: EngineLink, weights: Weights, in_thread):
    def engine() -> None:
        with IncomingWeights(link.socket_path, "cpu", 60) as incoming:
            list(incoming.tensors())
            raise ValueError("something is missing")

    loading = in_thread(engine)
    link.offer(0, put(link.half(0), ["layer-0"], weights))
    with pytest.raises(ActivationError, match="something is missing"):
        link.finish(60)
    assert isinstance(loading.exception(), ValueError)


def test_an_engine_that_stops_before_the_last_tensor_has_not_accepted(link: EngineLink, weights: Weights, in_thread):
    def engine() -> None:
        incoming = receive(link.socket_path, "cpu", 60)
        next(incoming)
        incoming.close()

    loading = in_thread(engine)
    link.offer(0, put(link.half(0), ["layer-0"], weights))
    with pytest.raises(ActivationError, match="it stopped before the last tensor"):
        link.finish(60)
    loading.result()


def test_an_engine_that_never_connects_or_stalls_is_waited_for_until_the_deadline(
    link: EngineLink, weights: Weights, in_thread
):
    link.offer(0, put(link.half(0), ["layer-0"], weights))
    with pytest.raises(TransportTimeout, match=r"\[cpu-0\] the engine has not connected within 0.1 s"):
        link.await_free(0, 0.1)
    stalled = receive(link.socket_path, "cpu", 60)
    next(stalled)
    with pytest.raises(TransportTimeout, match=r"the engine has not loaded its bucket within 0.1 s"):
        link.await_free(0, 0.1)
    stalled.close()


def test_an_engine_learns_why_the_server_gave_up(link: EngineLink, weights: Weights, in_thread):
    link.offer(0, put(link.half(0), ["layer-0"], weights))
    waiting = receive(link.socket_path, "cpu", 60)
    next(waiting)
    link.abort("rank 3 has died")
    link.close()
    with pytest.raises(TransportError, match="the ParameterServer gave up: rank 3 has died"):
        next(waiting)


def test_an_engine_does_not_wait_for_a_server_that_is_silent_or_gone(link: EngineLink, weights: Weights, in_thread):
    with pytest.raises(TransportTimeout, match="was silent for 0.1 s"):
        next(receive(link.socket_path, "cpu", 0.1))
    link.close()
    with pytest.raises(TransportError, match="no ParameterServer at .*: Connection refused"):
        next(receive(link.socket_path, "cpu", 60))


def test_closing_ends_an_engine_in_the_middle(link: EngineLink, in_thread):
    waiting = in_thread(lambda: list(receive(link.socket_path, "cpu", 60)))
    assert soon(waiting.running)
    time.sleep(0.1)
    link.close()
    with pytest.raises(TransportError):
        waiting.result()


def test_the_socket_goes_with_the_link_and_nothing_is_a_file():
    before = Counter(open_descriptors())
    link = EngineLink("cpu-0", HALF_NBYTES, timeout_s=60)
    assert link.socket_path in link_sockets(os.getpid())
    assert not Path(link.socket_path).exists()
    opened = Counter(open_descriptors()) - before
    assert [target for target in opened if target.startswith("/dev/shm/verl-")] == []
    link.close()
    link.close()
    assert link.socket_path not in link_sockets(os.getpid())


STRANGER = """
import os, socket, sys
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1][1:])
connection.settimeout(60)
print(connection.recv(1))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_turned_away_and_the_engine_served(weights: Weights, in_thread):
    with EngineLink("cpu-0", HALF_NBYTES, timeout_s=60) as link:
        command = [sys.executable, "-S", "-E", "-c", STRANGER, link.socket_path]
        stranger = subprocess.run(command, capture_output=True, text=True, check=True)
        assert stranger.stdout == "b''\n"  # closed before anything was said
        loaded = in_thread(lambda: dict(receive(link.socket_path, "cpu", 60)))
        link.offer(0, put(link.half(0), ["layer-0"], weights))
        link.finish(60)
        assert torch.equal(loaded.result()["layer-0"], weights["layer-0"])


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen]]:
    started: list[subprocess.Popen] = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", link_process.__name__, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stdout.close()


def test_an_engine_process_that_is_killed_is_noticed_at_once(weights: Weights, process):
    with EngineLink("cpu-0", HALF_NBYTES, timeout_s=60) as link:
        engine = process("engine", link.socket_path)
        link.offer(0, put(link.half(0), ["layer-0"], weights))
        assert engine.stdout.readline() == "layer-0\n"
        engine.kill()
        with pytest.raises(TransportError, match="died") as raised:
            link.await_free(0, 60)
        assert not isinstance(raised.value, TransportTimeout)


def test_a_server_process_that_is_killed_leaves_nothing_and_its_engine_fails(process):
    server = process("server")
    socket_path = server.stdout.readline().strip()
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(lambda: list(receive(socket_path, "cpu", 60)))
        time.sleep(0.2)
        server.kill()
        with pytest.raises(TransportError):
            engine.result()
    assert soon(lambda: not link_sockets(server.pid))
