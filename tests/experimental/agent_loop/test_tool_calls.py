"""What is known of tools' calls after their worker has died: none that may not be repeated is executed twice."""

import asyncio
import functools
import json
import os
import random
import re
import stat
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayActorError

from tests.checkpoint_engine.fakes import soon
from tests.experimental.agent_loop.scripted_server import said
from verl.experimental.agent_loop import AgentLoopManager, BaseTool, tool_calls
from verl.experimental.agent_loop.tool_calls import ToolAnswer, ToolCalls
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.utils.builtin.tokenizer import build_tokenizer

TURNS = 4
LONG = ("0", 1)
"""Sample and turn of a payment that takes until its worker is killed."""
ROLLOUT = "actor_rollout_ref.rollout"


class Service:
    """Counts what is executed."""

    def __init__(self, *answers):
        self.answers, self.executed, self.asked = list(answers), 0, 0
        self.released = asyncio.Event()
        self.released.set()

    async def execute(self):
        self.executed += 1
        await self.released.wait()
        return ToolAnswer(f"answer {self.executed}", [0.5], {"pay": 1.0}, {"more": [1]})

    async def outcome(self):
        self.asked += 1
        return ToolAnswer("interrupted")

    async def call(self, calls, key, *, idempotent=False):
        return await calls.answer(key, idempotent=idempotent, execute=self.execute, outcome=self.outcome)


def calls_in(path, uid="uid", **how):
    calls = ToolCalls(path, **how)
    return calls, calls.of(uid, (uid, 0))


async def begun(path, idempotent):
    """A call that its service is executing until it is released."""
    service = Service()
    service.released.clear()
    _, sample = calls_in(path)
    call = asyncio.create_task(service.call(sample, "key", idempotent=idempotent))
    while not service.executed:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return service, sample, call


async def test_a_call_has_one_key_in_all_attempts_and_no_other_call_has_it(tmp_path):
    calls, sample = calls_in(tmp_path / "0.calls")
    key = await sample.key([1, 2, 3], 0)
    others = [await sample.key([1, 2, 4], 0), await sample.key([1, 2, 3], 1)]
    others.append(await calls.of("uid", ("uid", 1)).key([1, 2, 3], 0))
    _, again = calls_in(tmp_path / "0.calls", takes_over=True)
    assert await again.key([1, 2, 3], 0) == key
    assert await again.request_id() == await sample.request_id() != key
    _, of_another_run = calls_in(tmp_path / "0.calls")
    others.append(await of_another_run.key([1, 2, 3], 0))
    assert len({key, *others}) == 5
    assert len(key) == 32


async def test_an_answer_outlives_its_worker(tmp_path):
    service = Service()
    _, sample = calls_in(tmp_path / "0.calls")
    answer = await service.call(sample, "key")
    _, again = calls_in(tmp_path / "0.calls", takes_over=True)
    assert await service.call(again, "key") == answer == ToolAnswer("answer 1", [0.5], {"pay": 1.0}, {"more": [1]})
    assert service.executed == 1
    _, of_another_run = calls_in(tmp_path / "0.calls")
    await service.call(of_another_run, "key")
    assert service.executed == 2


async def test_nobody_else_may_read_it(tmp_path):
    _, sample = calls_in(tmp_path / "tool_calls/0.calls")
    await Service().call(sample, "key")
    paths = [tmp_path / "tool_calls", tmp_path / "tool_calls/0.calls"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o600]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_call_that_had_begun_is_repeated_only_if_it_may_be(tmp_path, idempotent):
    service, sample, first = await begun(tmp_path / "0.calls", idempotent)
    other = Service()
    _, again = calls_in(tmp_path / "0.calls", takes_over=True)  # as if this process had died
    answer = await other.call(again, "key", idempotent=idempotent)
    assert (answer.content, other.executed, other.asked) == (
        ("answer 1", 1, 0) if idempotent else ("interrupted", 0, 1)
    )
    service.released.set()
    await first


@pytest.mark.parametrize("idempotent", [True, False])
async def test_an_attempt_in_the_same_process_waits_for_a_call_that_had_begun(tmp_path, idempotent):
    service, sample, first = await begun(tmp_path / "0.calls", idempotent)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(service.call(sample, "key", idempotent=idempotent))
    await asyncio.sleep(0)
    service.released.set()
    answer = await second
    assert (answer.content, service.executed, service.asked) == (
        ("answer 2", 2, 0) if idempotent else ("answer 1", 1, 0)
    )


async def test_an_error_that_ends_a_sample_comes_again(tmp_path):
    _, sample = calls_in(tmp_path / "0.calls")
    executed = []

    async def raise_it():
        executed.append(1)
        raise ValueError("it answers with a video")

    for _ in range(2):
        with pytest.raises(ValueError, match="a video"):
            await sample.answer("key", idempotent=False, execute=raise_it, outcome=raise_it)
    assert len(executed) == 1


async def test_what_was_written_half_is_no_answer(tmp_path):
    service, path = Service(), tmp_path / "0.calls"
    _, sample = calls_in(path)
    for key in ("one", "other"):
        await service.call(sample, key)
    os.truncate(path, path.stat().st_size - 1)
    _, again = calls_in(path, takes_over=True)
    assert [(await service.call(again, key)).content for key in ("one", "other")] == ["answer 1", "interrupted"]
    _, third = calls_in(path, takes_over=True)
    assert [(await service.call(third, key)).content for key in ("one", "other")] == ["answer 1", "interrupted"]
    assert (service.executed, service.asked) == (2, 1)


async def test_of_samples_that_are_complete_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tool_calls, "_REWRITTEN_NBYTES", 0)
    service, path = Service(), tmp_path / "0.calls"
    calls, sample = calls_in(path)
    other = calls.of("other", "other")
    empty = None
    for number in range(20):
        await service.call(sample, str(number))
        empty = empty or path.stat().st_size
    await service.call(other, "key")
    await calls.forget(["uid"])
    assert path.stat().st_size < 2 * empty
    await service.call(other, "next")
    again = ToolCalls(path, takes_over=True)
    assert [(await service.call(again.of("other", 0), key)).content for key in ("key", "next")] == [
        "answer 21",
        "answer 22",
    ]
    assert (await service.call(again.of("uid", 0), "0")).content == "answer 23"


async def test_answers_beyond_the_bound_are_not_kept_and_the_log_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tool_calls, "MOST_NBYTES", 2000)
    service, path = Service(), tmp_path / "0.calls"
    _, sample = calls_in(path)
    for number in range(5):
        await service.call(sample, str(number))
    assert caplog.text.count("answers of tools under way take over") == 1
    _, again = calls_in(path, takes_over=True)
    assert (await service.call(again, "0")).content == "answer 1"
    assert (await service.call(again, "4")).content == "interrupted"
    assert service.executed == 5


async def test_a_full_disk_ends_no_sample(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    service = Service()
    _, sample = calls_in(tmp_path / "file/0.calls")
    assert (await service.call(sample, "key")).content == "answer 1"
    assert "calls of tools may be repeated after a worker's death" in caplog.text


# ---- real workers


class Pay(BaseTool):
    """Writes down each execution, and its key; then takes a while."""

    schema = {
        "type": "function",
        "function": {"name": "pay", "description": "Pays.", "parameters": {"type": "object", "properties": {}}},
    }

    def write(self, line):
        with Path(self.config["ledger"]).open("a") as ledger:
            ledger.write(line)

    async def execute(self, arguments, idempotency_key):
        line = json.dumps({**arguments, "key": idempotency_key, "idempotent": self.idempotent}) + "\n"
        self.write(line)
        is_long = (arguments["sample"], arguments["turn"]) == LONG and not self.idempotent
        await asyncio.sleep(10 if is_long else random.random() * self.config["at_most_s"])
        return f"paid {arguments['turn']}"


class Look(Pay):
    idempotent = True
    schema = {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }


@functools.cache
def tokenizer():
    return build_tokenizer()


def policy(prompt_ids):
    """Deterministic, as a greedy engine is: it calls both tools in each of its turns, and then ends."""
    text = tokenizer().decode(prompt_ids)
    turn = text.count("<|assistant|>") - 1
    sample = text.split("<|user|>")[1].split("<|end|>")[0]
    message = f"done {sample}"
    if turn < TURNS:
        arguments = json.dumps({"sample": sample, "turn": turn})
        message = "".join(
            f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>' for name in ("pay", "look")
        )
    tokens = tokenizer().encode(message, add_special_tokens=False)
    return said([*tokens, tokenizer().eos_token_id])


def prompts(number):
    messages = [[{"role": "user", "content": str(each)}] for each in range(number)]
    return DataProto.from_dict({}, {"raw_prompt": messages, "uid": [f"uid {each}" for each in range(number)]})


def make_config(directory):
    config = {"ledger": str(directory / "ledger"), "at_most_s": 0.2}
    tools = [{"class_name": f"{__name__}:{name}", "config": config} for name in ("Pay", "Look")]
    (directory / "tools.yaml").write_text(json.dumps({"tools": tools}))
    return load_config(
        [
            f"{ROLLOUT}.multi_turn.enable=true",
            f"{ROLLOUT}.multi_turn.tool_config_path={directory / 'tools.yaml'}",
            f"{ROLLOUT}.multi_turn.max_parallel_calls=2",
            f"{ROLLOUT}.agent.num_workers=2",
            f"trainer.default_local_dir={directory / 'out'}",
            "data.max_prompt_length=1000",
            "data.max_response_length=3000",
        ]
    )


def executions(directory):
    return [json.loads(line) for line in (directory / "ledger").read_text().splitlines()]


def generated(manager, server, batch, directory, kills, chance):
    """Kills a worker that often: in a long payment, then each time after some more executions. Returns the batch, and
    how many were killed before it was complete."""
    killed = 0
    (directory / "ledger").touch()
    while True:
        generating = ThreadPoolExecutor(1).submit(manager.generate_sequences, batch)
        if killed < kills:
            if not killed:  # in the middle of a call
                assert soon(lambda: any((one["sample"], one["turn"]) == LONG for one in executions(directory)))
                victim = manager.workers[0]
            else:
                enough = len(executions(directory)) + chance.randint(1, len(batch))
                assert soon(lambda: generating.done() or len(executions(directory)) >= enough)  # noqa: B023
                time.sleep(chance.random() * 0.2)
                victim = chance.choice(manager.workers)
            ray.kill(victim)
            killed += not generating.done()
        try:
            return generating.result(), killed
        except RayActorError:
            manager.set_servers([server])


def check_conversation(sample, response):
    """It is that of a plain loop over the policy and its tools, but for payments that were interrupted: these."""
    text = tokenizer().decode([token for token in response if token != tokenizer().pad_token_id])
    answers = re.findall(r"<\|tool\|>(.*?)<\|end\|>", text)
    said_so_far, interrupted = "", set()
    for turn, payment in enumerate(answers[::2]):
        if payment == INTERRUPTED:
            interrupted.add((str(sample), turn))
        arguments = json.dumps({"sample": str(sample), "turn": turn})
        for name in ("pay", "look"):
            said_so_far += f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        paid = payment if payment == INTERRUPTED else f"paid {turn}"
        said_so_far += f"<|end|><|tool|>{paid}<|end|><|tool|>paid {turn}<|end|><|assistant|>"
    assert text == said_so_far + f"done {sample}<|end|>"
    assert len(answers) == 2 * TURNS
    return interrupted


def check_killed(start_server, tokenizer_path, directory, *, kills, samples, seed):
    server = start_server(policy)
    with AgentLoopManager(make_config(directory), [server], tokenizer_path) as manager:
        data, killed = generated(manager, server, prompts(samples), directory, kills, random.Random(seed))
    interrupted = set()
    for sample, response in enumerate(data.batch["responses"].tolist()):
        interrupted |= check_conversation(sample, response)
    all_payments = {(str(sample), turn) for sample in range(samples) for turn in range(TURNS)}
    done = executions(directory)
    paid = Counter((one["sample"], one["turn"]) for one in done if not one["idempotent"])
    assert all_payments - interrupted <= set(paid) <= all_payments
    assert max(paid.values()) == 1
    keys = {(one["idempotent"], one["sample"], one["turn"], one["key"]) for one in done}
    assert len({key for *_, key in keys}) == len(keys) == len(all_payments | interrupted) + len(paid)
    return killed, len(interrupted)


INTERRUPTED = "error: pay was interrupted; it may have been executed, and is not repeated"


def test_if_workers_are_killed_no_payment_is_made_twice_and_conversations_are_those_of_a_plain_loop(
    start_server, tokenizer_path, tmp_path
):
    killed, interrupted = check_killed(start_server, tokenizer_path, tmp_path, kills=2, samples=8, seed=1)
    assert 0 < interrupted <= 8 * killed
