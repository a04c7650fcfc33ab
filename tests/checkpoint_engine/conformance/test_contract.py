"""The tables of the recovery contract, and the relay in which faults hit."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.http_server import http_server
from verl.checkpoint_engine.conformance.contract import BROKEN, INJECTED, PHASES, PROMISES, cells
from verl.checkpoint_engine.conformance.damage import Mark, flip_in_memory
from verl.checkpoint_engine.conformance.faults import require_process
from verl.checkpoint_engine.conformance.injection import PLANS
from verl.checkpoint_engine.conformance.relay import Exchange, Relay
from verl.checkpoint_engine.conformance.routes import ROUTES, SGLANG_ROUTES
from verl.checkpoint_engine.conformance.verdicts import FAULTS
from verl.checkpoint_engine.engines.sglang.orders import LOADER, Order
from verl.checkpoint_engine.errors import ConfigError, TransportError
from verl.checkpoint_engine.parameter_server.http_server import HttpServer, Refused
from verl.checkpoint_engine.publisher.sglang_endpoint import _pickled

PAUSE, LOAD = "/pause?mode=wait", {"method": "reload_weights"}


@pytest.fixture
def relay():
    def answer(_: str, path: str, body: bytes) -> tuple[int, bytes]:
        said = {"path": path, "body": json.loads(body or b"null")}
        return (404, b'{"error": "no"}') if path == "/refused" else (200, json.dumps(said).encode())

    with http_server(answer) as url, Relay(url, timeout_s=30) as relay:
        yield relay


def test_every_fault_has_a_place_where_it_hits():
    planned = {(fault.name, phase) for fault in INJECTED for phase in fault.phases}
    assert {cell for cell in PLANS if cell not in planned} == set()
    assert {(name, phase) for name, phase in planned - set(PLANS)} == {
        ("no space", "before"),
        ("half of the bytes", "before"),
    }
    assert all(phase in PHASES for _, phase in planned)


@pytest.mark.parametrize("route", ROUTES | SGLANG_ROUTES)
def test_a_route_has_a_cell_for_every_fault_and_a_reason_for_one_that_is_not_tried(route):
    found = cells(route, with_worker=False)
    assert {fault.name for fault, _, _ in found} == {fault.name for fault in INJECTED}
    without = {"disk": {"no space"}, "distributed": {"no space"}, "arena": {"half of the bytes"}}.get(route, set())
    assert {fault.name for fault, _, reason in found if reason} == {"worker stopped", "worker killed"} | without
    assert {fault.name for fault, _, reason in cells(route, with_worker=True) if reason} == without
    assert {fault.name for fault, _, _ in cells(route, with_worker=False, only=["late load"])} == {"late load"}


def test_every_promise_names_the_classes_of_fault_that_break_it():
    assert list(BROKEN) == list(PROMISES)
    assert {fault for faults in BROKEN.values() for fault in faults} <= set(FAULTS)


def test_a_relay_passes_requests_and_answers_on(relay):
    server = HttpServer(relay.url, timeout_s=30)
    assert server.call("POST", PAUSE, {"a": 1}) == {"path": PAUSE, "body": {"a": 1}}
    with pytest.raises(Refused, match="no"):
        server.call("GET", "/refused")


@pytest.mark.parametrize("moment", ["arrived", "sent", "answered"])
def test_a_cut_request_breaks_off_and_the_next_one_does_not(moment, relay):
    def cut(exchange: Exchange) -> None:
        exchange.is_cut = True

    sprung = relay.trap("load", moment, cut)
    server = HttpServer(relay.url, timeout_s=30)
    server.call("POST", PAUSE)
    assert not sprung.is_set()
    with pytest.raises(TransportError, match="broke off"):
        server.call("POST", "/collective_rpc", LOAD)
    assert sprung.is_set()
    server.call("POST", "/collective_rpc", LOAD)
    assert relay.num_open == 0


def test_a_relay_that_is_down_resets_every_connection(relay):
    server = HttpServer(relay.url, timeout_s=30)
    relay.trap("load", "sent", lambda _: setattr(relay, "is_down", True))
    for path in ("/update_weights", PAUSE):
        with pytest.raises(TransportError):
            server.call("POST", path)
    relay.is_down = False
    server.call("POST", PAUSE)


def test_a_request_waits_in_the_relay_for_the_action(relay):
    may_go, server = threading.Event(), HttpServer(relay.url, timeout_s=30)
    relay.trap("resume", "arrived", lambda _: may_go.wait(30))
    request = threading.Thread(target=server.call, args=("POST", "/resume"))
    request.start()
    while relay.num_open == 0:
        pass
    assert request.is_alive()
    may_go.set()
    request.join(30)
    assert not request.is_alive()


def order(**what: Any) -> dict[str, Any]:
    """An order to our loader in SGLang's ranks, as the publisher sends it."""
    serialized = _pickled(Order(reports="/tmp", **what).encode())
    return {"serialized_named_tensors": [serialized], "load_format": LOADER}


TENSOR, GROUP = "/update_weights_from_tensor", "/update_weights_from_distributed"


@pytest.mark.parametrize(
    ("path", "body", "what", "ends_load"),
    [
        ("/pause_generation", {"mode": "abort"}, "pause", True),
        ("/pause_generation", {"mode": "in_place"}, "question", True),
        ("/continue_generation", {}, "resume", True),
        ("/update_weights_from_disk", {"model_path": "m"}, "load", True),
        (TENSOR, {"serialized_named_tensors": ["AAAA"], "weight_version": None}, "load", False),
        (TENSOR, {"serialized_named_tensors": ["AAAA"], "weight_version": "3"}, "load", True),
        (GROUP, {"names": ["a"]}, "load", False),
        (GROUP, {"names": ["a"], "weight_version": "3"}, "load", True),
        (TENSOR, order(arena_path="/dev/shm/arena", version=3), "load", True),
        (TENSOR, order(), "question", False),
        (TENSOR, order(tensors={"a": ("float32", [1])}), "question", False),
    ],
)
def test_the_calls_of_sglang_are_known_for_what_they_do(path: str, body: Any, what: str, ends_load: bool):
    exchange = Exchange(path, body)
    assert (exchange.what, exchange.ends_load) == (what, ends_load)


def test_the_arena_that_sglang_is_to_load_from_is_known():
    assert Exchange(TENSOR, order(arena_path="/dev/shm/arena", version=3)).arena_path == "/dev/shm/arena"
    assert Exchange(TENSOR, order()).arena_path == ""


def test_a_load_in_parts_is_answered_with_the_last_one(relay):
    sprung = relay.trap("load", "answered", lambda _: None)
    server = HttpServer(relay.url, timeout_s=30)
    server.call("POST", GROUP, {"names": ["a"]})
    assert not sprung.is_set()
    server.call("POST", GROUP, {"names": ["b"], "weight_version": "3"})
    assert sprung.is_set()


def test_a_bit_is_flipped_where_the_tensor_lies_and_nowhere_else(tmp_path):
    tensor = bytes(range(64))
    (tmp_path / "memory").write_bytes(bytes(100) + tensor + bytes(36))
    (tmp_path / "other").write_bytes(bytes(200))
    assert flip_in_memory([tmp_path / "memory", tmp_path / "other"], Mark(data=tensor, itemsize=4))
    after = (tmp_path / "memory").read_bytes()
    assert [at for at, byte in enumerate(after) if byte != (bytes(100) + tensor + bytes(36))[at]] == [103]
    assert not flip_in_memory([tmp_path / "other"], Mark(data=tensor, itemsize=4))


def test_a_process_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no such process"):
        require_process(2**22 + 1)
