import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError

from tests.checkpoint_engine.fakes import soon
from tests.experimental.agent_loop.scripted_server import NO_WEIGHTS, said
from verl.experimental.agent_loop import ServerManager
from verl.experimental.agent_loop.server_manager import Recording, Sample
from verl.experimental.agent_loop.unfinished import Told
from verl.utils.pictures import Picture
from verl.workers.rollout.errors import ReplicaDied, ReplicaTimeout, RolloutError
from verl.workers.rollout.records import SamplingOptions, TokenOutput, WeightVersionSpan

PROMPT = [65, 66]
SAMPLING = SamplingOptions(max_tokens=8)


async def calls_of(server):
    return (await server.seen.remote())["calls"]


async def until_called(server, times=1):
    while len(await calls_of(server)) < times:  # noqa: ASYNC110 - the calls are counted in another process
        await asyncio.sleep(0.02)


async def test_requests_spread_over_the_servers_by_load(start_server):
    servers = [start_server(), start_server()]
    manager = ServerManager(servers, timeout_s=120)
    await asyncio.gather(*(manager.generate(str(number), PROMPT, SAMPLING) for number in range(8)))
    assert [len(await calls_of(server)) for server in servers] == [4, 4]


async def test_a_busy_server_gets_no_more_while_another_is_idle(start_server):
    busy, idle = start_server("hang"), start_server()
    manager = ServerManager([busy, idle], timeout_s=120)
    held = asyncio.create_task(manager.generate("held", PROMPT, SAMPLING))
    await until_called(busy)
    for number in range(4):
        await manager.generate(str(number), PROMPT, SAMPLING)
    assert (len(await calls_of(busy)), len(await calls_of(idle))) == (1, 4)
    held.cancel()


async def test_the_turns_of_one_request_stay_on_its_server(start_server):
    servers = [start_server(), start_server()]
    manager = ServerManager(servers, timeout_s=120)
    for turn in range(3):
        for request in ("a", "b"):
            await manager.generate(request, [*PROMPT, 70 + turn], SAMPLING)
    owners = [{request_id.split(".")[0] for _, _, request_id in await calls_of(server)} for server in servers]
    assert owners in ([{"a"}, {"b"}], [{"b"}, {"a"}])


async def test_call_ids_are_unique_even_within_one_request(start_server):
    server = start_server()
    manager = ServerManager([server], timeout_s=120)
    for _ in range(3):
        await manager.generate("a", PROMPT, SAMPLING)
    assert len({request_id for _, _, request_id in await calls_of(server)}) == 3


async def test_only_the_latest_requests_are_remembered(start_server):
    first, second = start_server("echo", "echo", "hang"), start_server()
    manager = ServerManager([first, second], timeout_s=120, max_sticky_requests=2)
    for request in ("a", "b", "c"):
        await manager.generate(request, PROMPT, SAMPLING)
    held = asyncio.create_task(manager.generate("c", PROMPT, SAMPLING))  # stays on the first server and keeps it busy
    await until_called(first, 3)
    await manager.generate("a", PROMPT, SAMPLING)  # was on the first server, but that is forgotten
    held.cancel()
    assert [request_id.split(".")[0] for _, _, request_id in await calls_of(second)] == ["b", "a"]


async def test_an_aborted_response_is_continued_with_the_rest_of_its_budget(start_server):
    server = start_server(
        said([1, 2, 3], "aborted", version=4, log_prob=-1.0),
        said([4], "aborted", version=5, log_prob=-2.0),
        said([5, 6], "completed", version=5, log_prob=-3.0),
    )
    manager, sample = ServerManager([server], timeout_s=120), Sample()
    output = await manager.generate("a", PROMPT, SAMPLING, sample=sample)
    assert output.token_ids == [1, 2, 3, 4, 5, 6]
    assert output.log_probs == [-1.0, -1.0, -1.0, -2.0, -3.0, -3.0]
    assert output.stop_reason == "completed"
    assert output.weight_versions == (WeightVersionSpan(0, 3, 4), WeightVersionSpan(3, 6, 5))
    asked = [(prompt, sampling.max_tokens) for prompt, sampling, _ in await calls_of(server)]
    assert asked == [(PROMPT, 8), ([*PROMPT, 1, 2, 3], 5), ([*PROMPT, 1, 2, 3, 4], 4)]
    assert (sample.continuations, sample.computed_again) == (2, 4 + 5)  # what this engine had read before


async def test_the_rest_of_a_response_is_not_drawn_with_the_numbers_of_its_beginning(start_server):
    server = start_server(said([], "aborted"), said([1, 2], "aborted"), said([3], "aborted"), said([4]))
    await ServerManager([server], timeout_s=120).generate("a", PROMPT, replace(SAMPLING, seed=7))
    begun, again, *others = [sampling.seed for _, sampling, _ in await calls_of(server)]
    assert begun == again == 7  # nothing had been drawn
    assert len({begun, *others}) == 3


async def test_later_requests_of_a_conversation_and_of_its_group_ask_for_its_cache(start_server):
    kept = replace(said([1, 2, 3], "aborted"), cache="kept", cached_tokens=0)
    server = start_server(kept, replace(said([4]), cache="kept", cached_tokens=3), replace(said([5]), cache="other"))
    manager, sample, stranger = ServerManager([server], timeout_s=120), Sample("group"), Sample("stranger")
    await manager.generate("a", PROMPT, SAMPLING, sample=sample)
    assert sample.computed_again == 1  # of prompt and response but its last token the engine had three
    await manager.generate("sibling", PROMPT, SAMPLING, sample=sample)
    await manager.generate("b", PROMPT, SAMPLING, sample=stranger)
    assert (await server.seen.remote())["caches"] == [None, "kept", "kept", None]


@pytest.mark.parametrize(
    ("cache", "later", "found", "again"),
    [
        (None, {"version": 4}, 64, 0),  # the rest of 70 tokens fills no block
        (None, {"version": 4}, 32, 0),  # a block made room for others
        (None, {"version": 5}, 0, 64),
        ("4", {"version": 5, "cache": "4"}, 64, 0),
        ("4", {"version": 5, "cache": "4"}, 32, 0),
        ("4", {"version": 5, "cache": "5"}, 0, 64),  # the engine cleared what the older name had
    ],
)
async def test_of_a_later_turn_what_a_sync_took_counts_and_what_is_not_cached_in_any_case_does_not(
    start_server, cache, later, found, again
):
    def turn(tokens, version, cache=None, **counts):
        return replace(said(tokens, version=version), cache=cache, **counts)

    first = turn([1, 2, 3], 4, cache, reusable=64)
    server = start_server(first, turn([4], **later, cached_tokens=found, reusable=64))
    manager, sample = ServerManager([server], timeout_s=120), Sample()
    prompt = [*range(68)]
    await manager.generate("a", prompt, SAMPLING, sample=sample)
    await manager.generate("a", [*prompt, 1, 2, 3, 80, 81], SAMPLING, sample=sample)
    assert sample.computed_again == again


async def test_another_server_is_not_asked_for_a_cache(start_server):
    first, second = start_server(replace(said([1]), cache="kept"), "hang"), start_server()
    manager, sample = ServerManager([first, second], timeout_s=120), Sample("group")
    await manager.generate("a", PROMPT, SAMPLING, sample=sample)
    held = asyncio.create_task(manager.generate("a", PROMPT, SAMPLING))  # keeps the first one busy
    await until_called(first, 2)
    await manager.generate("sibling", PROMPT, SAMPLING, sample=sample)
    held.cancel()
    assert (await second.seen.remote())["caches"] == [None]


async def test_a_continued_response_sees_the_same_pictures_or_none(start_server):
    pictures = [Picture("/p", "0" * 64)]
    server = start_server(said([1], "aborted", seen=("a",)), said([2], seen=("a",)))
    output = await ServerManager([server], timeout_s=120).generate("a", PROMPT, SAMPLING, image_data=pictures)
    assert (output.token_ids, output.seen) == ([1, 2], ("a",))
    server = start_server(said([1], "aborted", seen=("a",)), said([2], seen=("b",)))
    with pytest.raises(RolloutError, match="two engines made different patches"):
        await ServerManager([server], timeout_s=120).generate("a", PROMPT, SAMPLING, image_data=pictures)


async def test_an_abort_at_the_end_of_the_budget_is_length(start_server):
    server = start_server(said([1] * 8, "aborted"))
    output = await ServerManager([server], timeout_s=120).generate("a", PROMPT, SAMPLING)
    assert (len(output.token_ids), output.stop_reason) == (8, "length")


async def test_an_aborted_response_comes_back_as_aborted_where_that_is_wanted(start_server):
    server = start_server(said([1, 2], "aborted"), said([3]))
    manager = ServerManager([server], timeout_s=120, continue_aborted=False)
    output = await manager.generate("a", PROMPT, SAMPLING)
    assert (output.token_ids, output.stop_reason) == ([1, 2], "aborted")


async def test_a_server_that_aborts_before_the_first_token_is_not_asked_in_a_busy_loop(start_server):
    server = start_server(said([], "aborted"), said([], "aborted"), said([], "aborted"), said([9]))
    started = time.monotonic()
    output = await ServerManager([server], timeout_s=120).generate("a", PROMPT, SAMPLING)
    assert output.token_ids == [9]
    assert output.log_probs == [-0.5]
    assert time.monotonic() - started > 0.3


async def test_a_dead_server_is_replaced_by_another_and_never_asked_again(start_server):
    dead, healthy = start_server(), start_server()
    ray.kill(dead)
    with pytest.raises(ActorDiedError):
        while True:
            await dead.seen.remote()
    manager = ServerManager([dead, healthy], timeout_s=120)
    sample = Sample()
    outputs = [await manager.generate(str(number), PROMPT, SAMPLING, sample=sample) for number in range(4)]
    assert [output.stop_reason for output in outputs] == ["completed"] * 4
    assert sample.retries == 1
    assert len(await calls_of(healthy)) == 4


async def test_a_server_without_weights_is_passed_over_for_this_request_only(start_server):
    waiting, healthy = start_server(NO_WEIGHTS, "echo"), start_server("echo", "hang")
    manager = ServerManager([waiting, healthy], timeout_s=120)
    sample = Sample()
    await manager.generate("a", PROMPT, SAMPLING, sample=sample)
    assert sample.retries == 1
    held = asyncio.create_task(manager.generate("a", PROMPT, SAMPLING))  # keeps the healthy one busy
    await until_called(healthy, 2)
    await manager.generate("b", PROMPT, SAMPLING)
    held.cancel()
    assert len(await calls_of(waiting)) == 2


async def test_when_no_server_is_left_the_error_says_what_became_of_each(start_server):
    manager = ServerManager([start_server("die"), start_server(NO_WEIGHTS)], timeout_s=120)
    with pytest.raises(ReplicaDied, match=r"request a: none of 2 .*server-0: .*server-1: server has no weights"):
        await manager.generate("a", PROMPT, SAMPLING)


async def test_the_deadline_covers_all_attempts_and_the_server_stops_working(start_server):
    server = start_server(said([1, 2], "aborted"), "hang")
    manager = ServerManager([server], timeout_s=15.0)
    with pytest.raises(
        ReplicaTimeout,
        match=r"request a: server-0 .* rollout.generate_timeout_s=15 \(2 prompt tokens, 2 of 8 response tokens",
    ):
        await manager.generate("a", PROMPT, SAMPLING)
    assert await asyncio.to_thread(soon, lambda: ray.get(server.seen.remote())["cancelled"] == 1)


async def test_an_error_of_the_engine_is_not_retried_and_keeps_its_traceback(start_server):
    failing, other = start_server(ValueError("no such token")), start_server()
    manager, sample = ServerManager([failing, other], timeout_s=120), Sample()
    with pytest.raises(ValueError, match="no such token") as caught:
        await manager.generate("a", PROMPT, SAMPLING, sample=sample)
    assert "scripted_server.py" in str(caught.value)
    assert sample.retries == 0


def test_without_servers_there_is_an_error_at_once():
    with pytest.raises(ValueError, match="no rollout servers"):
        ServerManager([], timeout_s=1)


async def test_killing_a_server_under_a_request_moves_the_request(start_server):
    first, second = start_server("hang"), start_server()
    manager = ServerManager([first, second], timeout_s=120)
    task = asyncio.create_task(manager.generate("a", PROMPT, SAMPLING))
    await until_called(first)
    ray.kill(first)
    assert (await task).stop_reason == "completed"


DIED = replace(
    said([1, 2, 3, 4, 5], "died"),
    log_probs=[-1.0, -2.0, -3.0, -4.0, -5.0],
    weight_versions=(WeightVersionSpan(0, 3, 6), WeightVersionSpan(3, 5, 7)),
)


async def told_counts(server):
    return [count for known in (await server.seen.remote())["asked"] for count in known.values()]


async def until_told(server, number):
    """Until somebody knows as many tokens of its first call."""
    while number not in await told_counts(server):  # noqa: ASYNC110 - asked for in another process
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("continue_aborted", [True, False])  # which is about responses that a sync interrupts
async def test_a_response_of_a_killed_server_goes_on_after_the_tokens_that_it_has_told_of(
    start_server, continue_aborted
):
    first, second = start_server(DIED), start_server(said([6, 7], "completed", version=9, log_prob=-6.0))
    manager = ServerManager([first, second], timeout_s=120, continue_aborted=continue_aborted, told_every_s=0.02)
    sample = Sample()
    task = asyncio.create_task(manager.generate("a", PROMPT, SAMPLING, sample=sample))
    await until_told(first, 5)
    ray.kill(first)
    output = await task
    assert output.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert output.log_probs == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -6.0]
    assert output.stop_reason == "completed"
    assert output.weight_versions == (
        WeightVersionSpan(0, 3, 6), WeightVersionSpan(3, 5, 7), WeightVersionSpan(5, 7, 9)
    )  # fmt: skip
    assert [(prompt, sampling.max_tokens) for prompt, sampling, _ in await calls_of(second)] == [
        ([*PROMPT, 1, 2, 3, 4, 5], 3)
    ]
    assert (sample.retries, sample.continuations) == (1, 0)
    assert sample.computed_again == 0  # of a sync; agent_loop/retries counts deaths


async def test_a_response_with_a_seed_begins_again_when_its_server_dies_and_nothing_is_told_of_it(start_server):
    first, second = start_server(DIED, "hang"), start_server(said([6]))
    manager = ServerManager([first, second], timeout_s=120, told_every_s=0.02)
    without = asyncio.create_task(manager.generate("a", PROMPT, SAMPLING))
    await until_told(first, 5)
    seeded = asyncio.create_task(manager.generate("a", PROMPT, replace(SAMPLING, seed=7)))  # on the same server
    await until_called(first, 2)
    asked = len((await first.seen.remote())["asked"])
    while len((await first.seen.remote())["asked"]) < asked + 3:  # noqa: ASYNC110 - counted in another process
        await asyncio.sleep(0.02)
    assert {call for known in (await first.seen.remote())["asked"] for call in known} == {"a.0"}
    ray.kill(first)
    assert (await without).token_ids == [1, 2, 3, 4, 5, 6]
    assert (await seeded).token_ids == [6]
    asked = [(prompt, sampling.seed) for prompt, sampling, _ in await calls_of(second)]
    assert sorted(asked, key=str) == [([*PROMPT, 1, 2, 3, 4, 5], None), (PROMPT, 7)]


async def test_a_server_whose_engine_died_answers_with_all_tokens_whatever_it_has_told_before(start_server):
    first, second = start_server(DIED), start_server(said([7]))
    manager = ServerManager([first, second], timeout_s=120, told_every_s=0.02)
    task = asyncio.create_task(manager.generate("a", PROMPT, SAMPLING))
    await until_told(first, 2)
    await first.give_up.remote(said([1, 2, 3, 4, 5, 6], "died"))
    assert (await task).token_ids == [1, 2, 3, 4, 5, 6, 7]
    await manager.generate("a", PROMPT, SAMPLING)
    assert len(await calls_of(first)) == 1  # it is not asked again


async def test_a_server_that_cannot_tell_is_asked_once(start_server):
    server = start_server("hang")
    manager = ServerManager([server], timeout_s=120, told_every_s=0.02)
    held = [asyncio.create_task(manager.generate("a", PROMPT, SAMPLING))]
    while not await told_counts(server):  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.02)
    held.append(asyncio.create_task(manager.generate("b", PROMPT, SAMPLING)))
    await until_called(server, 2)
    await asyncio.sleep(0.2)
    assert len((await server.seen.remote())["asked"]) == 1
    for task in held:
        task.cancel()


def test_experts_of_a_told_response_are_those_of_its_prompt_and_tokens_but_the_last():
    told = Told()
    assert told.output() is None
    experts = np.arange(6).reshape(6, 1, 1)  # two of the prompt, four of the response, whose fifth token is the last
    for start, stop, rows in ((0, 2, slice(0, 3)), (2, 5, slice(3, 6))):
        told.add(replace(said([7] * (stop - start), "died"), routed_experts=experts[rows], seen=("digest",)))
    output = told.output()
    assert len(output.token_ids) == told.num_tokens == 5
    assert output.weight_versions == (WeightVersionSpan(0, 5, 0),)
    assert output.routed_experts.tolist() == experts.tolist()
    assert output.seen == ("digest",)


class Asked:
    """A `ServerManager` that notes the seeds of requests."""

    def __init__(self):
        self.seeds = []

    async def generate(self, request_id, prompt_ids, sampling, *, sample, so_far, name):
        self.seeds.append(sampling.seed)
        return TokenOutput([1], None, "length", ())


async def test_every_call_of_a_sample_has_a_seed_of_its_own_that_follows_from_the_samples():
    asked = Asked()
    for seed in (7, 7, 8):
        sample = Recording(asked, seed=seed)
        for _ in range(3):
            await sample.generate("any", PROMPT, {"max_tokens": 8})
    assert asked.seeds[:3] == asked.seeds[3:6]
    assert len(set(asked.seeds)) == 6


async def test_without_a_seed_the_engine_draws_and_a_loop_may_still_give_one():
    asked = Asked()
    sample = Recording(asked)
    await sample.generate("any", PROMPT, SAMPLING)
    await sample.generate("any", PROMPT, sampling_params={"max_tokens": 8, "seed": 5})
    assert asked.seeds == [None, 5]
