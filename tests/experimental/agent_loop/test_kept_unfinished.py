"""What an agent-loop worker has of unfinished answers when its driver dies."""

import asyncio
import os
import stat
from dataclasses import replace

import pytest

from tests.experimental.agent_loop.scripted_server import said
from verl.experimental.agent_loop import AgentLoopWorker, kept_unfinished, worker
from verl.experimental.agent_loop.attempts import Call
from verl.experimental.agent_loop.kept_unfinished import KeptUnfinished, read
from verl.experimental.agent_loop.registry import known_loops
from verl.experimental.agent_loop.unfinished import Partial, Told
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config

RUN = "run"


def call(name, *pieces, told=None, is_complete=False):
    found = Call(name, Partial(8))
    for piece in pieces:
        found.so_far.add(piece)
    if told is not None:
        found.so_far.told = Told()
        found.so_far.told.add(told)
    if is_complete:
        found.output = found.so_far.output("completed")
    return found


async def written(directory, *calls, run=RUN):
    """Once, as by the worker of rank 0."""
    kept = KeptUnfinished(directory, 0, run, lambda: calls)
    while not (directory / "0.unfinished").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    kept.close()


def answers(found):
    return {
        sample: [(one.asked, one.so_far.token_ids, one.output is not None, one.so_far.room) for one in calls]
        for sample, calls in found.items()
    }


async def test_a_later_driver_reads_what_was_complete_and_what_was_told_of_the_rest(tmp_path):
    whole = call("first", said([1, 2], version=1), said([3], version=2), is_complete=True)
    part = call("second", said([4], "aborted", version=1), told=said([5, 6], "died", version=2))
    await written(tmp_path, ("one", whole), ("one", part), ("two", call("third")))
    found = read(tmp_path, 0, RUN, 2)
    assert answers(found) == {"one": [("first", [1, 2, 3], True, 5), ("second", [4, 5, 6], False, 5)]}
    first, second = found["one"]
    assert first.output == whole.output
    known = second.so_far.known()
    assert [(span.start, span.stop, span.version) for span in known.weight_versions] == [(0, 1, 1), (1, 3, 2)]
    assert known.log_probs == [-0.5] * 3


async def test_nothing_of_another_run_or_rank_or_of_a_damaged_file_is_taken(tmp_path):
    await written(tmp_path, ("one", call("first", said([1, 2]))))
    assert read(tmp_path, 0, "another", 0) == read(tmp_path, 1, RUN, 0) == {}
    assert read(tmp_path, 0, RUN, 0) != {}
    path = tmp_path / "0.unfinished"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert read(tmp_path, 0, RUN, 0) == {}
    os.truncate(path, 10)
    assert read(tmp_path, 0, RUN, 0) == {}


async def test_tokens_of_versions_that_do_not_come_again_are_generated_again(tmp_path):
    early, late = call("first", said([1], "aborted", version=1)), call("second", said([2], "aborted", version=3))
    await written(tmp_path, ("one", early), ("one", late), ("one", call("third", said([3], version=1))))
    assert answers(read(tmp_path, 0, RUN, 2)) == {"one": [("first", [1], False, 7)]}


async def test_the_file_is_written_anew_when_something_has_come_and_not_before(tmp_path):
    looks, part = [], call("first", said([1], "aborted"))

    def calls():
        looks.append(len(looks))
        return [("one", part)]

    async def until(condition):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    path = tmp_path / "0.unfinished"
    kept = KeptUnfinished(tmp_path, 0, RUN, calls)
    await until(path.exists)
    first, number = path.stat().st_ino, len(looks)
    await until(lambda: len(looks) > number + 5)
    assert path.stat().st_ino == first
    part.so_far.told = Told()
    part.so_far.told.add(said([2], "died"))
    await until(lambda: path.stat().st_ino != first)
    kept.close()
    assert answers(read(tmp_path, 0, RUN, 0)) == {"one": [("first", [1, 2], False, 6)]}


async def test_nobody_else_may_read_it(tmp_path):
    await written(tmp_path / "kept", ("one", call("first", said([1, 2]))))
    paths = [tmp_path / "kept", tmp_path / "kept/0.unfinished"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o600]


async def test_beyond_the_bound_nothing_is_kept_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kept_unfinished, "MOST_TOKENS", 3)
    await written(tmp_path, ("one", call("first", said([1, 2]))), ("two", call("second", said([3, 4]))))
    assert list(read(tmp_path, 0, RUN, 0)) == ["one"]
    assert "answers under way have over 3 tokens" in caplog.text


def in_file(directory):
    return [call.so_far.token_ids for calls in read(directory, 0, RUN, 1).values() for call in calls]


def worker_of(server, tokenizer_path):
    config = load_config(["data.max_prompt_length=16", "data.max_response_length=4"])
    return AgentLoopWorker(
        config=config, servers=[server], tokenizer_path=str(tokenizer_path), loops=known_loops(None), rank=0
    )


@pytest.mark.parametrize("run", [RUN, "another"])
async def test_in_a_resumed_run_a_worker_goes_on_after_the_last_token(start_server, tokenizer_path, tmp_path, run):
    told = replace(said([7, 8, 9], "died", version=1), log_probs=[-1.0, -2.0, -3.0])
    server, later = start_server(told), start_server(said([10], version=2))
    samples = DataProto.from_dict({}, {"raw_prompt": [[{"role": "user", "content": "a"}]], "uid": ["one"]})
    samples.meta_info |= {"validate": False, "unfinished": (str(tmp_path), RUN)}
    before = worker_of(server, tokenizer_path)
    generating = asyncio.create_task(before.generate_sequences(samples, 0))
    while not any(3 in known.values() for known in (await server.seen.remote())["asked"]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    while in_file(tmp_path) != [[7, 8, 9]]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    generating.cancel()
    await asyncio.wait([generating])
    again = worker_of(later, tokenizer_path)
    assert await again.take_unfinished(tmp_path, run, 1, {"two"}) == 0  # that prompt is complete elsewhere
    assert await again.take_unfinished(tmp_path, run, 1, {"one"}) == (3 if run == RUN else 0)
    data = await again.generate_sequences(samples, 0)
    ((prompt, sampling, _),) = (await later.seen.remote())["calls"]
    if run == RUN:
        assert (prompt[-3:], sampling.max_tokens) == ([7, 8, 9], 1)
        assert data.batch["responses"].tolist() == [[7, 8, 9, 10]]
        assert data.batch["rollout_log_probs"].tolist() == [[-1.0, -2.0, -3.0, -0.5]]
        assert data.batch["rollout_versions"].tolist() == [[1, 1, 1, 2]]
    else:
        assert sampling.max_tokens == 4


@pytest.mark.parametrize(("lingers_s", "left"), [(600.0, [[1, 2]]), (0.0, [])])
async def test_what_is_complete_stays_in_the_file_until_it_has_reached_that_of_samples(
    start_server, tokenizer_path, tmp_path, monkeypatch, lingers_s, left
):
    monkeypatch.setattr(worker, "LINGERS_S", lingers_s)
    samples = DataProto.from_dict({}, {"raw_prompt": [[{"role": "user", "content": "a"}]], "uid": ["one"]})
    samples.meta_info |= {"validate": False, "unfinished": (str(tmp_path), RUN)}
    generating = worker_of(start_server(said([1, 2])), tokenizer_path)
    await generating.generate_sequences(samples, 0)
    await generating.generate_sequences(samples, 1)  # another one: what of the first is in the file is seen after it
    while in_file(tmp_path) != 2 * left:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
