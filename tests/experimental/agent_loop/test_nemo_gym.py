"""Environments behind real resources servers of NeMo-Gym, and behind servers that fail or lie."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import requests

from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from tests.http_server import http_server
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.errors import AgentCodeError, AgentSetupError
from verl.experimental.agent_loop.registry import BUILTIN, LoopEntry, check_loop, loop_factory
from verl.trainer.config.loader import load_config
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.utils.data import main
from verl.utils.dataset.files import Rows
from verl.workers.rollout.records import SamplingOptions

PACKAGES = Path(__file__).parents[3] / ".venv/nemo-gym"
SERVER = Path(__file__).with_name("nemo_gym_server.py")
SERVERS = {
    "counter": "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer",
    "synonyms": "resources_servers.example_multi_step.app:ExampleMultiStepResourcesServer",
}
EXAMPLES = {name: PACKAGES / Path(*target.split(".")[:2]) / "data/example.jsonl" for name, target in SERVERS.items()}
LOOP = BUILTIN["nemo_gym"].target
CONFIG = load_config(["data.max_prompt_length=20000"])
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def resources_servers():
    """Their addresses."""
    if not PACKAGES.is_dir():
        pytest.skip("NeMo-Gym is not installed: make environments")
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, str(SERVER), *SERVERS.values()]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield {name: f"http://127.0.0.1:{int(process.stdout.readline())}" for name in SERVERS}
        finally:
            process.kill()


def example(name):
    """The first row of the package's own data."""
    return json.loads(EXAMPLES[name].read_text("utf-8").split("\n")[0])


def calling(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def loop_of(url, manager, **options):
    entry = LoopEntry(LOOP, {"url": url, **options})
    check_loop("gym", {"gym": entry})
    return loop_factory("gym", {"gym": entry})(
        trainer_config=DictConfigWrap(CONFIG),
        server_manager=manager,
        tokenizer=TOKENIZER,
    )


async def played(url, row, *answers, room=5000, **options):
    """The output of a sample, and the policy's prompts."""
    manager = ScriptedManager(TOKENIZER, *answers)
    loop = loop_of(url, manager, **options)
    sampling = SamplingOptions(max_tokens=room).as_dict()
    prompt = [{"role": "user", "content": "of the data"}]
    output = await loop.run(sampling, raw_prompt=prompt, extra_info={"nemo_gym": json.dumps(row)})
    return output, [TOKENIZER.decode(each) for each in manager.prompts]


def plainly(url, row, *steps):
    """What `/verify` answers a plain client that makes these calls, or says these texts."""
    output = []
    with requests.Session() as session:

        def ask(path, body):
            return session.post(f"{url}/{path}", json=body, timeout=60)

        ask("seed_session", row).raise_for_status()
        for number, step in enumerate(steps):
            if isinstance(step, str):
                content = [{"type": "output_text", "text": step, "annotations": []}]
                output.append({"type": "message", "id": str(number), "role": "assistant", "content": content})
                continue
            name, arguments = step
            call = {"type": "function_call", "call_id": str(number), "name": name, "arguments": json.dumps(arguments)}
            answer = {"type": "function_call_output", "call_id": str(number), "output": ask(name, arguments).text}
            output += [call, answer]
        response = {"id": "1", "created_at": 0, "model": "plain", "object": "response", "output": output}
        response |= {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        found = ask("verify", {**row, "response": response})
        found.raise_for_status()
        return found.json()


def add(count):
    return ("increment_counter", {"count": count})


RUNS = {
    "counted": ("counter", 1.0, [add(1), add(2), ("get_counter_value", {}), "It is 6."]),
    "miscounted": ("counter", 0.0, [add(1), ("get_counter_value", {}), "It is 4."]),
    "not even tried": ("counter", 0.0, ["It is 6."]),
    "found": (
        "synonyms",
        1.0,
        [
            ("get_synonym_value", {"synonym": "Blazing"}),
            ("get_synonym_value", {"synonym": "Warm"}),
            ("extract_synonym_values", {"synonym_values": [711, 407]}),
            "They are there.",
        ],
    ),
    "in the wrong order": ("synonyms", 0.0, [("extract_synonym_values", {"synonym_values": [407, 711]}), "There."]),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_reward_is_what_the_server_gives_a_plain_client_for_the_same_conversation(resources_servers, name):
    server, reward, steps = RUNS[name]
    row, url = example(server), resources_servers[server]
    expected = plainly(url, row, *steps)
    texts = [step if isinstance(step, str) else calling(step[0], **step[1]) for step in steps]
    output, prompts = asyncio.run(played(url, row, *texts))
    assert output.reward_score == expected["reward"] == reward
    counted = {name: output.numbers[f"environment/{name}"] for name in ("turns", "tool_calls", "tool_errors")}
    assert counted == {"turns": len(steps), "tool_calls": len(steps) - 1, "tool_errors": 0}
    own = {name: value for name, value in expected.items() if name not in row and isinstance(value, (bool, float))}
    del own["reward"]
    assert {name: output.numbers[f"environment/{name}"] for name in own} == own
    assert row["responses_create_params"]["input"][-1]["content"] in prompts[0]
    assert row["responses_create_params"]["tools"][0]["name"] in prompts[0]
    sampled = [token for text in texts for token in (*TOKENIZER.encode(text), TOKENIZER.eos_token_id)]
    assert [token for token, mine in zip(output.response_ids, output.response_mask, strict=True) if mine] == sampled


def test_the_policy_reads_what_a_tool_answers_its_errors_too(resources_servers):
    url, row = resources_servers["counter"], example("counter")
    texts = [calling("increment_counter", count="many"), calling("increment_counter", count=3), "6"]
    output, prompts = asyncio.run(played(url, row, *texts))
    assert "Input should be a valid integer" in prompts[1]
    assert '{"success":true}' in prompts[2]
    assert (output.reward_score, output.numbers["environment/tool_errors"]) == (1.0, 1.0)


def test_only_tools_of_the_row_are_called(resources_servers):
    url, row = resources_servers["counter"], example("counter")
    seeded = calling("seed_session", **{**row, "initial_count": 6})
    output, prompts = asyncio.run(played(url, row, seeded, "6"))
    assert "there is no tool 'seed_session'" in prompts[1]
    assert (output.reward_score, output.numbers["environment/tool_errors"]) == (0.0, 1.0)


def test_sessions_of_samples_at_once_do_not_mix(resources_servers):
    row = example("counter")

    async def many():
        rows = [{**row, "initial_count": 0, "expected_count": number} for number in range(6)]
        calls = [[calling("increment_counter", count=1)] * number for number in range(6)]
        return await asyncio.gather(
            *(played(resources_servers["counter"], each, *calls[number], "done") for number, each in enumerate(rows))
        )

    assert [output.reward_score for output, _ in asyncio.run(many())] == [1.0] * 6


def test_a_conversation_that_ends_early_is_verified_as_it_is(resources_servers):
    url, row = resources_servers["counter"], example("counter")
    texts = [calling("increment_counter", count=3)] * 4
    output, _ = asyncio.run(played(url, row, *texts, max_turns=1))
    assert (output.reward_score, output.numbers["environment/turns"]) == (1.0, 1)
    room = len(TOKENIZER.encode(texts[0])) + 5
    output, _ = asyncio.run(played(url, row, *texts, room=room))
    assert (output.reward_score, output.stop_reason, output.numbers["environment/turns"]) == (1.0, "length", 1)


def test_rows_of_another_server_end_the_run(resources_servers):
    with pytest.raises(
        AgentSetupError, match="is none for these rows: seed_session: 422: initial_count: Field required"
    ):
        asyncio.run(played(resources_servers["counter"], example("synonyms"), "1"))
    with pytest.raises(
        AgentSetupError, match="is none for these rows: verify: 422: id: Field required; expected_synonym_values"
    ):
        asyncio.run(played(resources_servers["synonyms"], example("counter"), "1"))
    with pytest.raises(AgentSetupError, match="is none for these rows: seed_session: 404"):
        asyncio.run(played(f"{resources_servers['counter']}/v1", example("counter"), "1"))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_of_the_package_feed_the_loader(resources_servers, tmp_path, suffix, capsys):
    path = tmp_path / f"train.{suffix}"
    assert main(["prepare", "nemo_gym", "--from", str(EXAMPLES["counter"]), "--to", str(path), "--agent", "gym"]) == 0
    assert capsys.readouterr().out == f"{path}: 5 samples of gym\n"
    rows = Rows([path], ["prompt", "agent_name", "data_source", "extra_info"])
    first = rows.read(0, len(rows))[0]
    assert first["prompt"] == example("counter")["responses_create_params"]["input"]
    assert (first["agent_name"], json.loads(first["extra_info"]["nemo_gym"])) == ("gym", example("counter"))
    assert main(["prepare", "nemo_gym", "--from", str(EXAMPLES["counter"]), "--to", str(path)]) == 2


ROW = {"responses_create_params": {"input": "Go.", "tools": [{"type": "function", "name": "go"}]}, "truth": 1}
GONE = "the environment ended in {}: ServerDisconnectedError"
FAILURES = {
    "seed_session": [
        ((500, b"boom"), "the environment failed in seed_session: 500: boom"),
        ((200, b"[]"), r"the environment failed in seed_session: 200: \[\]"),
        (None, GONE.format("seed_session")),
    ],
    "go": [((503, b"full"), "the environment failed in go: 503: full"), (None, GONE.format("go"))],
    "verify": [
        ((500, b"boom"), "the environment failed in verify: 500: boom"),
        ((200, b"<html>"), "the environment failed in verify: 200: <html>"),
        ((200, b"{}"), "the environment gave the reward None"),
        ((200, b'{"reward": NaN}'), "the environment gave the reward nan"),
        ((200, b'{"reward": 1e999}'), "the environment gave the reward inf"),
        ((200, b'{"reward": "1.0"}'), "the environment gave the reward '1.0'"),
        ((200, b'{"reward": [1.0]}'), r"the environment gave the reward \[1.0\]"),
        ((422, b'{"detail": [{"loc": ["body", "response", "output"]}]}'), "the environment failed in verify: 422"),
        (None, GONE.format("verify")),
    ],
}


@pytest.fixture
def unruly():
    """`(address, answers, asked)` of a server that answers with `answers`, by path; a text hangs."""
    answers, asked, over = {}, [], threading.Event()
    good = {"/seed_session": (200, b"{}"), "/go": (200, b"gone"), "/verify": (200, b'{"reward": 1, "truth": 1}')}

    def answer(_, path, body):
        asked.append((path, json.loads(body)))
        found = {**good, **answers}[path]
        if isinstance(found, str):
            over.wait(60)
            return None
        return found

    with http_server(answer) as url:
        yield url, answers, asked
        over.set()


@pytest.mark.parametrize(
    ("path", "answer", "said"), [(path, *each) for path, failures in FAILURES.items() for each in failures]
)
def test_a_failure_or_a_lie_of_the_server_is_the_samples_alone(unruly, path, answer, said):
    url, answers, _ = unruly
    answers[f"/{path}"] = answer
    with pytest.raises(AgentCodeError, match=said) as failure:
        asyncio.run(played(url, ROW, calling("go"), "done", on_failure="raise"))
    assert not isinstance(failure.value, AgentSetupError)
    output, _ = asyncio.run(played(url, ROW, calling("go"), "done"))
    assert (output.reward_score, output.numbers["agent_failed"]) == (0.0, 1.0)


def test_a_server_that_does_not_score_a_conversation_without_room_is_named(unruly):
    url, answers, _ = unruly
    answers["/verify"] = (500, b"boom")
    room = len(TOKENIZER.encode(calling("go"))) + 5
    with pytest.raises(AgentCodeError, match="the environment failed in verify: 500: boom"):
        asyncio.run(played(url, ROW, calling("go"), room=room, on_failure="raise"))


@pytest.mark.parametrize("path", ["go", "verify"])
def test_a_server_that_hangs_ends_the_sample_at_its_deadline(unruly, path):
    url, answers, _ = unruly
    answers[f"/{path}"] = "hang"
    output, _ = asyncio.run(played(url, ROW, calling("go"), "done", timeout_s=1.0))
    assert (output.reward_score, output.numbers["agent_failed"]) == (0.0, 1.0)


def test_what_the_server_is_asked_is_the_row_the_arguments_and_the_whole_conversation(unruly):
    url, answers, asked = unruly
    answers["/verify"] = (200, b'{"reward": 0.5, "truth": 7, "tries": 2, "note": "x", "share": NaN}')
    output, _ = asyncio.run(played(url, ROW, calling("go", far=True), "<think>Now I say it.</think>done"))
    assert output.reward_score == 0.5
    told = {name: value for name, value in output.numbers.items() if name.startswith("environment/")}
    assert told == {
        f"environment/{name}": value
        for name, value in {"tries": 2, "turns": 2, "tool_calls": 1, "tool_errors": 0}.items()
    }
    assert [path for path, _ in asked] == ["/seed_session", "/go", "/verify"]
    assert [body for _, body in asked[:2]] == [ROW, {"far": True}]
    verified = asked[2][1]
    response = verified.pop("response")
    assert verified == ROW
    call, answer, thought, message = response["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("go", {"far": True})
    assert answer == {"type": "function_call_output", "call_id": call["call_id"], "output": "gone"}
    assert thought["summary"] == [{"type": "summary_text", "text": "Now I say it."}]
    assert message["content"] == [{"type": "output_text", "text": "done", "annotations": []}]
    assert response["status"] == "completed"


def test_a_server_that_is_not_there_ends_the_run():
    with pytest.raises(AgentSetupError, match=r"no resources server of NeMo-Gym answers at http://127\.0\.0\.1:9"):
        asyncio.run(played("http://127.0.0.1:9", ROW, "1", connect_s=0.1))


def test_a_sample_without_a_row_ends_the_run():
    with pytest.raises(AgentSetupError, match="extra_info.nemo_gym is no object.*prepare nemo_gym"):
        asyncio.run(played("http://127.0.0.1:9", None, "1"))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"input": []}, "input is neither a text nor a list of items"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"input\[0\] is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\] has a part that is no text"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] is no function with a name"),
        ({"tool_choice": "required"}, "tool_choice='required' is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens=0 is no number from 1 on"),
        ({"instuctions": "x"}, "instuctions='x' is not supported. Did you mean 'instructions'"),
    ],
)
def test_rows_that_cannot_be_kept_to_are_refused_with_their_line(tmp_path, params, said, capsys):
    path = tmp_path / "rows.jsonl"
    lines = [ROW, {"responses_create_params": {"input": "Go.", **params}}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["prepare", "nemo_gym", "--from", str(path), "--to", str(tmp_path / "out.jsonl")]) == 2
    assert re.search(f"{path}: line 2 .*{said}", capsys.readouterr().err)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(("content", "said"), [(b"PAR1\xff", "has no rows in JSON"), (b"\n", "has no rows")])
def test_a_file_without_rows_is_refused(tmp_path, content, said, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert main(["prepare", "nemo_gym", "--from", str(path), "--to", str(tmp_path / "out.jsonl")]) == 2
    assert f"{path} {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "ws://127.0.0.1:8000"}, "url='ws://127.0.0.1:8000': is no address like http://host:8000"),
        ({"url": None}, "needs url, a text"),
        ({"max_turns": 0}, "max_turns=0 is no number from 1 on"),
        ({"connect_s": -1}, "connect_s=-1 is not a positive number"),
        ({"on_failure": "ignore"}, "on_failure='ignore' is none of raise, zero"),
        ({"timeouts": 3}, "unknown 'timeouts'. Did you mean 'timeout_s'"),
    ],
)
def test_options_are_checked_before_work_starts(options, said):
    with pytest.raises(ConfigError, match=said):
        loop_of(**{"url": "http://127.0.0.1:9", "manager": None} | options)
