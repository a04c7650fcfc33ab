"""What servers keep of an agent-loop worker that died, and what another one makes of it."""

import asyncio

import pytest

from tests.experimental.agent_loop.scripted_server import said
from verl.experimental.agent_loop.attempts import Attempts, asked, calls_of
from verl.workers.rollout import kept_calls
from verl.workers.rollout.kept_calls import KeptCalls
from verl.workers.rollout.records import CallName, SamplingOptions

SAMPLING = SamplingOptions(max_tokens=8)


def name(sample="sample", request="request", start=0, owner="worker"):
    return CallName(owner, sample, request, 8, start)


def test_pieces_from_several_servers_are_one_answer_in_their_order():
    pieces = [
        (name(start=2), said([3, 4], "aborted", version=2)),
        (name(start=4), said([5], "completed", version=3)),
        (name(start=0), said([1, 2], "aborted", version=1)),
    ]
    ((call,),) = calls_of(pieces).values()
    assert call.output.token_ids == [1, 2, 3, 4, 5]
    assert [(span.start, span.stop, span.version) for span in call.output.weight_versions] == [
        (0, 2, 1), (2, 4, 2), (4, 5, 3)
    ]  # fmt: skip
    assert call.output.stop_reason == "completed"


def test_what_follows_a_piece_that_is_lost_is_left_out():
    pieces = [(name(start=0), said([1, 2], "aborted")), (name(start=4), said([5], "completed"))]
    ((call,),) = calls_of(pieces).values()
    assert (call.output, call.so_far.token_ids) == (None, [1, 2])
    assert calls_of(pieces[1:]) == {}


def test_calls_are_of_their_samples_and_requests():
    pieces = [
        (name("one", "a"), said([1])), (name("one", "b"), said([2])), (name("two", "a"), said([3]))
    ]  # fmt: skip
    found = calls_of(pieces)
    assert {sample: {call.asked: call.output.token_ids for call in calls} for sample, calls in found.items()} == {
        "one": {"a": [1], "b": [2]},
        "two": {"a": [3]},
    }


def test_requests_are_the_same_with_the_same_prompt_sampling_and_pictures():
    assert asked([1, 2], SAMPLING, None) == asked((1, 2), SAMPLING, [])
    assert asked([1, 2], SAMPLING, None) != asked([1, 3], SAMPLING, None)
    assert asked([1, 2], SAMPLING, None) != asked([1, 2], SamplingOptions(max_tokens=7), None)


def test_what_is_left_is_taken_once():
    attempts = Attempts()
    attempts.leave("sample", ["call"])
    assert (attempts.take("sample"), attempts.take("sample")) == (["call"], [])


async def test_a_server_keeps_answers_until_their_sample_is_complete_or_its_worker_has_died(monkeypatch):
    monkeypatch.setattr(kept_calls, "MOST_TOKENS", 9)
    kept, output = KeptCalls(), said([1, 300, 70_000], log_prob=-0.1)
    for number, one in enumerate([name("one"), name("two"), name("two", owner="other")]):
        with kept.during(str(number), one) as keep:
            keep(output)
    kept.forget("worker", ["one"])
    hanging = asyncio.create_task(hang(kept, name("three")))
    await asyncio.sleep(0)
    taken = kept.take("worker", {"hanging": said([9], "died")}.get)
    assert taken == [(name("two"), output), (name("three"), said([9], "died"))]
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert kept.take("worker", {}.get) == []
    for number in range(5):
        with kept.during(str(number), name(number)) as keep:
            keep(output)
    assert [one.sample for one, _ in kept.take("worker", {}.get)] == [2, 3, 4]  # three tokens each


async def hang(kept, one):
    with kept.during("hanging", one):
        await asyncio.sleep(600)
