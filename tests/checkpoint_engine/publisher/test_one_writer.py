"""A server has one writer at a time, and what a push reports is what the server's workers say that they have loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch

from tests.checkpoint_engine.fakes import arenas_in
from tests.checkpoint_engine.stand_in_vllm import StandIn, stand_in
from verl.checkpoint_engine import ConfigError, SyncAborted, WeightPublisher
from verl.checkpoint_engine.conformance.relay import Exchange, Relay
from verl.checkpoint_engine.engines.vllm.plugin import answer_of
from verl.checkpoint_engine.errors import ActivationError
from verl.checkpoint_engine.parameter_server.endpoints import FLAG, Endpoint
from verl.checkpoint_engine.parameter_server.writers import LEASE_S, Ledger, Order, Writer, order

Served = tuple[StandIn, str]


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with stand_in(request.param) as found:
        yield found


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8, 3), value), "norm": torch.full((5,), -value)}


def assert_serves(vllm: StandIn, version: int, value: float) -> None:
    assert (vllm.version, vllm.paused) == (str(version), False)
    assert all(torch.equal(vllm.weights[name], tensor) for name, tensor in tensors(value).items())
    assert [[*worker.unread] for worker in vllm.workers] == [[]] * vllm.ranks


def test_a_second_publisher_is_told_whose_a_server_is_until_the_first_is_closed(served: Served, shm: Path):
    vllm, url = served
    with WeightPublisher(tensors(1), [url]) as first:
        first.push(100)
        with WeightPublisher(tensors(2), [url]) as second:
            with pytest.raises(
                ConfigError, match=rf"{url} belongs to another publisher: the publisher of process \d+ on "
            ):
                second.push(100)
            assert_serves(vllm, 100, 1)
            first.push(101)
            first.close()
            second.push(100)
            assert_serves(vllm, 100, 2)


def test_update_is_told_whose_a_server_is(served: Served, shm: Path):
    vllm, url = served
    with WeightPublisher(tensors(1), [url]) as publisher:
        publisher.push(1)
        with pytest.raises(ConfigError, match="belongs to another publisher: the publisher"):
            Endpoint(url, timeout_s=60).update({}, "2")
        assert_serves(vllm, 1, 1)


def test_a_writer_that_gets_in_between_does_not_get_its_weights_in(served: Served, shm: Path):
    """The claim is looked at when workers load, not only before."""
    vllm, url = served
    other = Writer.here("other")

    def steals(path: str) -> None:
        if path == "/update_weights":
            for worker in vllm.workers:
                worker.ledger = Ledger()
                worker.answer(msgspec.json.encode(order("claim", other)).decode())

    held = tensors(1)
    with WeightPublisher(held, [url]) as publisher:
        publisher.push(1)
        vllm.before = steals
        held["w"] = torch.full((8, 3), 5.0)
        with pytest.raises(SyncAborted, match="is being written by the other of process"):
            publisher.push(2)
        assert vllm.version == "1"
        assert torch.equal(vllm.weights["w"], tensors(1)["w"])


@pytest.mark.parametrize("begun", [["start"], ["start", "update"]])
def test_an_update_that_a_dead_publisher_has_begun_leaves_no_answer_unread(begun: list[str], served: Served, shm: Path):
    vllm, url = served
    vllm.rpc("start")
    if "update" in begun:  # of an arena that is gone: one rank has given up, the others wait
        with pytest.raises(ActivationError):
            vllm.rpc("update", {"arena_path": str(shm / "gone"), "version": 1, "writer": "dead", "load": "l"})
    with WeightPublisher(tensors(1), [url]) as publisher:
        for version in range(2):
            publisher.push(version)
            assert_serves(vllm, version, 1)


def test_a_status_is_not_believed(served: Served, shm: Path):
    vllm, url = served
    with WeightPublisher(tensors(1), [url]) as publisher:
        publisher.push(1)
        vllm.sleeps_through = True
        with pytest.raises(SyncAborted, match="loaded the version of .*, though it did not refuse"):
            publisher.push(2)
        assert vllm.version == "1"
        vllm.sleeps_through = False
        publisher.push(3)
        assert_serves(vllm, 3, 1)


def test_what_workers_have_loaded_is_compared_with_what_was_pushed(served: Served, shm: Path):
    vllm, url = served
    with stand_in() as (_, other_url), WeightPublisher(tensors(7), [other_url]) as other:
        other.push(2)
        (misleads,) = (path for path in arenas_in(shm) if "publisher" in path.name)
        with WeightPublisher(tensors(1), [url]) as publisher:
            publisher.push(1)
            vllm.misleads = str(misleads)
            with pytest.raises(SyncAborted, match="loaded other weights as version 2 than the pushed ones"):
                publisher.push(2)
            vllm.misleads = ""
            publisher.push(3)
            assert_serves(vllm, 3, 1)


def test_answers_that_lag_are_found_out_before_anything_is_paused(shm: Path):
    with stand_in(2) as (vllm, url), WeightPublisher(tensors(1), [url]) as publisher:
        publisher.push(1)
        with pytest.raises(ActivationError):
            vllm.rpc("finish")  # as others provoke it: rank 1 has refused, too, and nobody has read that
        vllm.log.clear()
        with pytest.raises(
            ConfigError, match="do not report their version .*without a matching start.*: restart the server"
        ):
            publisher.push(2)
        with pytest.raises(ActivationError, match="return the answer of an earlier call"):
            publisher.push(2)
        assert "/pause" not in vllm.log
        vllm.start()
        publisher.push(2)
        assert_serves(vllm, 2, 1)


@pytest.mark.parametrize("is_known", [False, True])
def test_what_cannot_take_weights_is_refused_before_anything_is_paused(is_known: bool, served: Served, shm: Path):
    vllm, url = served
    with WeightPublisher(tensors(1), [url]) as publisher:
        if is_known:
            publisher.push(0)
        vllm.log.clear()
        vllm.refuses = "it serves LoRA adapters"
        with pytest.raises(ConfigError, match="takes no weights: it serves LoRA adapters"):
            publisher.push(1)
        assert "/pause" not in vllm.log
    assert vllm.holders == {None}


def test_a_server_that_was_started_without_our_engine_is_refused_with_the_flag_that_it_needs(
    served: Served, shm: Path, monkeypatch: pytest.MonkeyPatch
):
    vllm, url = served
    for worker in vllm.workers:
        monkeypatch.setattr(worker, "answer", lambda order: answer_of(None, order, False, ()))
    with WeightPublisher(tensors(1), [url]) as publisher:
        with pytest.raises(ConfigError, match=re.escape(f"{url} cannot take our weights: start vLLM with {FLAG}")):
            publisher.push(1)
        assert "/pause" not in vllm.log


def test_one_server_under_two_names_is_refused(served: Served, shm: Path):
    vllm, url = served
    other = url.replace("127.0.0.1", "localhost")
    with (
        WeightPublisher(tensors(1), [url, other]) as publisher,
        pytest.raises(ConfigError, match=f"{url} and {other} are the same server: name it once"),
    ):
        publisher.push(1)
    assert "/pause" not in vllm.log
    assert vllm.holders == {None}


def test_a_server_that_was_started_anew_is_asked_again_and_gets_all(served: Served, shm: Path):
    vllm, url = served
    with WeightPublisher(tensors(1), [url]) as publisher:
        publisher.push(1)
        vllm.start()
        publisher.push(2)
        assert len(vllm.checked) == vllm.ranks
        assert_serves(vllm, 2, 1)


STEPS = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"]


@pytest.mark.parametrize("step", STEPS)
def test_one_of_two_servers_that_refuses_a_request_serves_what_its_workers_hold(step: str, served: Served, shm: Path):
    vllm, url = served
    left = [step]

    def refuses(path: str) -> None:
        if path in left:
            left.remove(path)
            raise ActivationError("told to refuse")

    held = tensors(1)
    with stand_in(1) as (other, other_url), WeightPublisher(held, [other_url, url]) as publisher:
        publisher.push(1)
        vllm.before = refuses
        held |= tensors(2)
        with pytest.raises(SyncAborted, match=f"{url} could not load it; {other_url} serve it"):
            publisher.push(2)
        assert_serves(other, 2, 2)
        assert_serves(vllm, *((1, 1) if step in STEPS[:3] else (2, 2)))
        held |= tensors(3)
        publisher.push(3)
        for one in (vllm, other):
            assert_serves(one, 3, 3)


@pytest.mark.parametrize("moment", ["sent", "answered"])
def test_a_server_whose_answer_to_a_load_is_lost_has_the_label_of_what_it_serves(
    moment: Literal["sent", "answered"], served: Served, shm: Path
):
    def cut(exchange: Exchange) -> None:
        exchange.is_cut = True

    vllm, url = served
    with Relay(url, timeout_s=60) as relay, WeightPublisher(tensors(1), [relay.url]) as publisher:
        relay.trap("load", moment, cut)
        with pytest.raises(SyncAborted):  # the first push: there is no version to go back to
            publisher.push(2)
        assert_serves(vllm, 2, 1)


def test_a_server_that_is_started_anew_after_it_has_loaded_is_not_said_to_serve_the_version(served: Served, shm: Path):
    vllm, url = served
    with WeightPublisher(tensors(1), [url]) as publisher:
        vllm.before = lambda path: vllm.start() if path == "/resume" else None
        with pytest.raises(SyncAborted, match="have not loaded the version"):
            publisher.push(1)
        vllm.before = lambda path: None
        publisher.push(2)
        assert_serves(vllm, 2, 1)


def test_an_update_that_fails_is_ended_only_where_it_is_active(served: Served, shm: Path):
    """Or each of several workers refuses, and the answer of one is read."""
    vllm, url = served
    with WeightPublisher(tensors(1), [url], config={"slots": 1}) as publisher:
        vllm.before = lambda path: vllm.start() if path == "/update_weights" else None
        with pytest.raises(SyncAborted, match="start_weight_update must be called before"):
            publisher.push(1)
        assert "/finish_weight_update" not in vllm.log


def test_a_server_that_cannot_be_given_the_version_before_gets_the_next_one(served: Served, shm: Path):
    """With one slot that is gone as soon as another has been committed."""
    vllm, url = served

    def fails(path: str) -> None:
        if path == "/resume":
            raise ActivationError("told to fail")

    held = tensors(1)
    with WeightPublisher(held, [url], config={"slots": 1}) as publisher:
        publisher.push(1)
        vllm.before = fails
        with pytest.raises(SyncAborted, match="told to fail"):
            publisher.push(2)
        vllm.before = lambda path: None
        held |= tensors(3)
        publisher.push(3)
        assert_serves(vllm, 3, 3)


def test_a_new_publisher_does_not_take_an_answer_that_lags_for_that_of_its_check(shm: Path):
    with stand_in(2) as (vllm, url), WeightPublisher(tensors(1), [url]) as publisher:
        vllm.rpc("start")
        with pytest.raises(ActivationError):
            vllm.rpc("start")
        with pytest.raises(ConfigError, match="already active.* has left answers unread: restart the server"):
            publisher.push(1)
        assert "/init_weight_transfer_engine" not in vllm.log
        vllm.start()
        publisher.push(1)
        assert_serves(vllm, 1, 1)


def test_answers_that_lag_behind_a_call_that_returns_nothing_are_named(shm: Path):
    with stand_in(2) as (vllm, url), WeightPublisher(tensors(1), [url]) as publisher:
        vllm.rpc("start")
        with pytest.raises(ActivationError):
            vllm.rpc("start")
        vllm.workers[1].unread[0] = (True, None)  # and the refusal itself has been read meanwhile
        with pytest.raises(ActivationError, match="a refused call left answers unread. Restart the server"):
            publisher.push(1)


def test_a_head_of_its_own_is_not_pushed_to_a_server_that_computes_with_the_embedding(served: Served, shm: Path):
    vllm, url = served
    vllm.copies = {"lm_head.weight": "embed.weight"}
    held = {"embed.weight": torch.rand(7, 3), "lm_head.weight": torch.rand(7, 3)}
    with WeightPublisher(held, [url]) as publisher:
        for is_first in (True, False):
            vllm.log.clear()
            with pytest.raises(ConfigError, match=r"computes with embed.weight in the place of lm_head.weight"):
                publisher.push(1)
            assert "/pause" not in vllm.log
            if is_first:
                held["lm_head.weight"] = held["embed.weight"].clone()
                publisher.push(0)
                assert vllm.version == "0"
                held["lm_head.weight"] = held["embed.weight"] + 1e-3
        assert (vllm.version, vllm.paused) == ("0", False)


# --- the ledger -------------------------------------------------------------------------------------------------------


def asked(ledger: Ledger, one: Order) -> dict[str, Any]:
    return ledger.answer(msgspec.json.encode(one).decode(), rank=0, active=False, refuses="")


def test_a_claim_ends_unless_it_is_renewed():
    now = [0.0]
    ledger, first, second = Ledger(lambda: now[0]), Writer.here("first"), Writer.here("second")
    asked(ledger, order("claim", first))
    now[0] += LEASE_S - 1
    assert asked(ledger, order("claim", second))["claimed_by"]["id"] == first.id
    asked(ledger, order("claim", first))
    now[0] += LEASE_S - 1
    asked(ledger, order("release", second))
    assert ledger.holder == first
    now[0] += 1
    assert ledger.holder is None
    assert asked(ledger, order("claim", second))["claimed_by"]["id"] == second.id
    asked(ledger, order("release", second))
    assert ledger.holder is None


def test_a_claim_ends_with_its_process():
    program = (
        "import msgspec, sys; from verl.checkpoint_engine.parameter_server.writers import Writer;"
        "sys.stdout.buffer.write(msgspec.json.encode(Writer.here('publisher'))); sys.stdout.flush(); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout is not None
        told = process.stdout.peek()
        writer = msgspec.json.decode(told, type=Writer)
        ledger = Ledger()
        asked(ledger, order("claim", writer))
        assert ledger.holder == writer
        process.kill()
        process.wait()
    assert ledger.holder is None
