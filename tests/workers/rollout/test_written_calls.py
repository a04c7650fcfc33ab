import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import forked
from tests.checkpoint_engine.fakes import soon
from verl.experimental.agent_loop import ServerManager
from verl.experimental.agent_loop.unfinished import Partial, Told
from verl.workers.rollout import written_calls
from verl.workers.rollout.records import TokenOutput, WeightVersionSpan
from verl.workers.rollout.written_calls import CallDirectory, WrittenCalls

ANSWER = TokenOutput(
    [11, 12, 13, 14, 15],
    [-0.1, -0.2, -1 / 3, -0.4, -0.5],
    "completed",
    (WeightVersionSpan(0, 3, 6, "replica-0", 5), WeightVersionSpan(3, 5, 7, "replica-0", 5)),
    np.arange(12, dtype=np.int16).reshape(6, 1, 2),  # of two tokens of a prompt, and four of the answer
    cache="engine/5/5",
    cached_tokens=1,
    reusable=4,
    seen=("digest",),
)


def part(start: int, stop: int) -> TokenOutput:
    """What `TellingEngine.so_far` says after `start` tokens, when there are `stop`."""
    spans = [(max(span.start, start), min(span.stop, stop), span) for span in ANSWER.weight_versions]
    return replace(
        ANSWER,
        token_ids=ANSWER.token_ids[start:stop],
        log_probs=ANSWER.log_probs[start:stop],
        stop_reason="died",
        weight_versions=tuple(replace(span, start=a - start, stop=b - start) for a, b, span in spans if b > a),
        routed_experts=ANSWER.routed_experts[1 + start if start else 0 : 1 + stop],
    )


class Engine:
    """One that has sampled so many tokens of its only call."""

    def __init__(self) -> None:
        self.sampled = 0

    def so_far(self, request_id: str, known: int) -> TokenOutput | None:
        return part(known, self.sampled) if self.sampled > known else None


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_SHM_DIR", str(tmp_path))
    made = CallDirectory()
    yield made
    made.close()


async def until(condition):
    assert await asyncio.to_thread(soon, condition)


def same(output: TokenOutput, other: TokenOutput) -> bool:
    uncompared = ("cache", "cached_tokens", "reusable", "computed_again")
    if any(getattr(output, name) != getattr(other, name) for name in uncompared):
        return False
    return output == other and output.routed_experts.tolist() == other.routed_experts.tolist()


async def test_what_is_sampled_of_a_call_is_known_without_asking_its_server(directory):
    engine = Engine()
    calls = WrittenCalls(engine.so_far)
    with directory.reading() as file, calls.during("a", file.path):
        told = Told(file)
        for sampled in (2, 3, 4):
            engine.sampled = sampled
            await until(lambda sampled=sampled: told.num_tokens == sampled)
            assert same(told.output(), part(0, sampled))


async def test_an_answer_that_does_not_arrive_is_there_to_its_last_token_and_complete(directory):
    engine = Engine()
    calls = WrittenCalls(engine.so_far)
    for sampled in (0, 1, 4):
        engine.sampled = sampled
        with directory.reading() as file:
            told = Told(file)
            with calls.during("a", file.path) as write:
                await until(lambda told=told, sampled=sampled: told.num_tokens == sampled)
                write(ANSWER)
            assert same(told.output(), ANSWER)


async def test_a_complete_answer_that_did_not_arrive_is_not_gone_on_with(directory):
    with directory.reading() as file, WrittenCalls(Engine().so_far).during("a", file.path) as write:
        so_far = Partial(8)
        so_far.told = Told(file)
        write(part(0, 2))
        assert so_far.known().stop_reason == "died"
        write(ANSWER)
        assert so_far.known().stop_reason == "completed"
        so_far.add(so_far.told.output())  # when its caller is cancelled
    servers = ServerManager([None], timeout_s=120)
    output = await servers.generate("a", [1], {"max_tokens": 8}, so_far=so_far)
    assert (output.token_ids, output.stop_reason) == (ANSWER.token_ids, "completed")


async def test_of_a_record_that_is_not_whole_or_not_what_was_written_nothing_is_taken_nor_of_later_ones(directory):
    with directory.reading() as file, WrittenCalls(Engine().so_far).during("a", file.path) as write:
        begun = file.path.stat().st_size
        write(part(0, 2))
        first = file.path.stat().st_size
        write(ANSWER)
        whole = file.path.read_bytes()
        for damaged in (whole[: first + 1], whole[:-1], whole[: first - 1] + b"\xff" + whole[first:]):
            file.path.write_bytes(damaged)
            told = Told(written_calls.ReadCall(file.path, os.open(file.path, os.O_RDONLY)))
            found = told.output()
            if damaged[begun:first] == whole[begun:first]:
                assert found.token_ids == [11, 12]
            else:
                assert found is None


async def test_a_server_on_another_host_and_one_whose_memory_is_full_write_nothing_more(directory, monkeypatch):
    with directory.reading() as file:
        with WrittenCalls(Engine().so_far).during("a", directory.path / "elsewhere") as write:
            write(ANSWER)
        assert not file.is_written
        with WrittenCalls(Engine().so_far).during("a", file.path) as write:
            assert file.is_written
            write(part(0, 2))
            monkeypatch.setattr(written_calls, "MOST_NBYTES", 10)
            write(replace(ANSWER, token_ids=ANSWER.token_ids * 2))
            monkeypatch.undo()
            write(ANSWER)  # with a hole before it
        assert Told(file).output().token_ids == [11, 12]


async def test_files_are_this_users_alone_and_go_with_their_calls(directory):
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    with directory.reading() as file, directory.reading() as other:
        assert file.path != other.path
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [path.name for path in directory.path.iterdir()] == ["lock"]


def hold_a_call(shm_dir: str) -> None:
    os.environ["VERL_SHM_DIR"] = shm_dir
    with CallDirectory().reading():
        os.kill(os.getpid(), 9)


def test_nothing_is_left_of_a_worker_that_is_killed(tmp_path: Path):
    assert forked.run(hold_a_call, str(tmp_path)).returncode == -9
    assert soon(lambda: not list(tmp_path.iterdir()))
