"""Agents that know OpenAI's client alone are trained on the tokens that the policy wrote for them.

Tokens are compared with those of the tool loop, which has the same conversation without a server.
"""

import asyncio
import contextlib
import functools
import json
import os
import sys

import httpx
import openai
import psutil
import pytest

from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from tests.experimental.agent_loop.templates import FAMILIES, QWEN, tokenizer_of
from verl.experimental.agent_loop import AgentLoopError, ToolAgentLoop, agent_program
from verl.experimental.agent_loop import openai_agent as module
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.errors import AgentCodeError, PromptTooLong
from verl.experimental.agent_loop.openai_agent import OpenAIAgentLoop
from verl.experimental.agent_loop.openai_endpoint import RETRY_HEADER
from verl.experimental.agent_loop.registry import LoopEntry, check_loop
from verl.trainer.config.loader import load_config
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.workers.rollout.errors import ReplicaDied
from verl.workers.rollout.records import SamplingOptions

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
PROMPT = [{"role": "user", "content": "1+2?"}]
HERE = __name__


@functools.cache
def config_of(*overrides):
    return load_config(["data.max_prompt_length=2000", *overrides])


def client_of(access):
    plain = openai.DefaultAsyncHttpxClient(verify=False)  # certificates of all the world are loaded otherwise
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, http_client=plain)


async def ask(access, messages, **further):
    async with client_of(access) as client:
        return await client.chat.completions.create(model=access.model, messages=messages, **further)


async def say(access, messages, **further):
    """Asks, and adds the answer to the messages, as clients do."""
    answer = await ask(access, messages, **further)
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return answer.choices[0]


def run(does, *texts, tokenizer=None, overrides=(), budget=20_000, manager=None, log_probs=True, **options):
    """The output of an agent whose policy says `texts`."""
    tokenizer = tokenizer or build_tokenizer()
    manager = manager or ScriptedManager(tokenizer, *texts)
    loop = OpenAIAgentLoop(
        trainer_config=DictConfigWrap(config_of(*overrides)),
        server_manager=manager,
        tokenizer=tokenizer,
        **({"agent": f"{HERE}:the_agent"} | options),
    )
    the_agent.does = does
    sampling = SamplingOptions(max_tokens=budget, logprobs=log_probs).as_dict()
    return asyncio.run(loop.run(sampling, raw_prompt=PROMPT, extra_info={"n": 3}))


async def the_agent(access, sample):
    return await the_agent.does(access, sample)


def the_blocking_agent(access, sample):
    return the_blocking_agent.does(access, sample)


@pytest.fixture(scope="module")
def tools_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.yaml"
    path.write_text("tools: [{class_name: 'tests.experimental.agent_loop.fakes:AddTool'}]")
    return path


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_agent_with_tools_is_trained_on_the_tokens_of_the_tool_loop(family, tools_file):
    tokenizer = tokenizer_of(family)
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    overrides = [f"{multi_turn}.enable=true", f"{multi_turn}.tool_config_path={tools_file}"]
    overrides.append(f"{multi_turn}.max_parallel_calls=2")
    texts = (f"<think>sum</think>{CALL}", f"again</think>{CALL}{CALL}", "so</think>it is 3")
    manager = ScriptedManager(tokenizer, *texts)
    config = config_of(*overrides)
    tool_loop = ToolAgentLoop(trainer_config=DictConfigWrap(config), server_manager=manager, tokenizer=tokenizer)
    expected = asyncio.run(tool_loop.run(SamplingOptions(max_tokens=20_000).as_dict(), raw_prompt=PROMPT))

    async def agent(access, sample):
        messages = [*sample["messages"]]
        while (choice := await say(access, messages, tools=ToolAgentLoop.shown_tools(config))).message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            for call in choice.message.tool_calls:
                numbers = json.loads(call.function.arguments)
                answer = await tool_loop.tools["add"].execute(numbers)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(answer)})
        assert (choice.message.content, choice.finish_reason) == ("so</think>it is 3", "stop")

    found = run(agent, *texts, tokenizer=tokenizer, overrides=overrides)
    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "response_versions", "num_turns"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.stop_reason, found.reward_score, found.metrics["agent_calls"]) == ("completed", None, 3)


@pytest.mark.parametrize("sent_back", ["whole", "without reasoning", "only stripped"])
def test_thoughts_stay_in_the_tokens_whatever_the_template_or_the_agent_drops(sent_back):
    tokenizer = tokenizer_of(QWEN)  # its template drops the thoughts of earlier messages

    async def agent(access, sample):
        messages = [*sample["messages"]]
        choice = await say(access, messages)
        kept = {"whole": choice.message.content, "without reasoning": "one", "only stripped": "sum</think> one"}
        messages[-1]["content"] = kept[sent_back]
        await say(access, [*messages, {"role": "user", "content": "sure?"}])

    manager = ScriptedManager(tokenizer, "sum</think> one ", "yes")
    output = run(agent, tokenizer=tokenizer, manager=manager)
    first = tokenizer.encode("sum</think> one ", add_special_tokens=False)
    assert output.response_ids[: len(first)] == first
    assert manager.prompts[1][: len(manager.prompts[0]) + len(first)] == [*manager.prompts[0], *first]


def test_what_the_agent_returns_is_the_reward_or_reaches_the_reward_function():
    async def agent(access, sample):
        assert sample["extra_info"] == {"n": 3}
        await ask(access, sample["messages"])
        return agent.result

    for result, reward, extra in (
        (None, None, {}),
        (0.5, 0.5, {}),
        (True, 1.0, {}),
        ("three", None, {"agent_output": "three"}),
        ({"score": 1, "steps": [1, 2]}, 1.0, {"steps": [1, 2]}),
    ):
        agent.result = result
        output = run(agent, "3")
        assert (output.reward_score, dict(output.extra_fields)) == (reward, extra)
    agent.result = float("nan")
    with pytest.raises(AgentCodeError, match="the reward nan"):
        run(agent, "3")


def test_a_second_conversation_is_refused_unless_the_last_one_is_asked_for():
    async def agent(access, sample):
        await ask(access, sample["messages"])
        await ask(access, [{"role": "user", "content": "something else"}])

    with pytest.raises(AgentLoopError, match=r"second conversation \(messages\[0\] of role user is another one\)"):
        run(agent, "first", "second")
    output = run(agent, "first", "second", conversations="last")
    assert build_tokenizer().decode(output.response_ids, skip_special_tokens=True) == "second"


def test_a_client_that_repeats_a_request_gets_the_same_answer():
    async def agent(access, sample):
        first = await ask(access, sample["messages"])
        again = await ask(access, sample["messages"], extra_headers={RETRY_HEADER: "1"})
        assert first.choices[0].message.content == again.choices[0].message.content == "once"

    assert run(agent, "once", "twice").metrics["agent_calls"] == 1


@pytest.mark.parametrize("turn", [1, 2])
def test_a_client_that_went_before_it_had_its_answer_may_ask_again(turn):
    class HangsOnce(ScriptedManager):
        """In one turn, until its client has gone."""

        async def generate(self, *args, **kwargs):
            if len(self.prompts) + 1 == turn and not gone:
                gone.append(True)
                asked.set()
                await asyncio.Event().wait()
            return await super().generate(*args, **kwargs)

    async def agent(access, sample):
        messages = [*sample["messages"]]
        for number in (1, 2):
            if number == turn:
                first = asyncio.create_task(ask(access, messages))
                await asked.wait()
                first.cancel()
            await say(access, messages)
            messages.append({"role": "user", "content": "sure?"})

    gone, asked, tokenizer = [], asyncio.Event(), build_tokenizer()
    found = run(agent, tokenizer=tokenizer, manager=HangsOnce(tokenizer, "one", "two"))
    gone = [True]
    asked.set()
    expected = run(agent, tokenizer=tokenizer, manager=HangsOnce(tokenizer, "one", "two"))
    assert (found.response_ids, found.response_mask) == (expected.response_ids, expected.response_mask)
    assert found.prompt_ids == expected.prompt_ids


def test_an_answer_that_nobody_got_is_not_taken_for_an_empty_message():
    """The chat template would write one between the two messages of the user."""

    class HangsOnce(ScriptedManager):
        async def generate(self, *args, **kwargs):
            if not asked.is_set():
                asked.set()
                await asyncio.Event().wait()
            return await super().generate(*args, **kwargs)

    async def agent(access, sample):
        first = asyncio.create_task(ask(access, sample["messages"]))
        await asked.wait()
        first.cancel()
        await ask(access, [*sample["messages"], {"role": "user", "content": "hurry"}])

    asked, tokenizer = asyncio.Event(), build_tokenizer()
    with pytest.raises(AgentLoopError, match="second conversation .the first one waits for an answer"):
        run(agent, tokenizer=tokenizer, manager=HangsOnce(tokenizer, "one", "two"))


def test_a_conversation_without_room_ends_whatever_the_agent_makes_of_it():
    async def agent(access, sample):
        messages = [*sample["messages"]]
        while True:
            await say(access, messages)
            messages.append({"role": "user", "content": "go on, there is a lot to say"})

    output = run(agent, *["word " * 4] * 9, budget=150)
    assert (output.stop_reason, output.metrics["agent_failed"]) == ("length", 0)
    assert output.response_mask[-1] == 1
    with pytest.raises(PromptTooLong, match="data.max_prompt_length=3"):
        run(agent, "never", overrides=["data.max_prompt_length=3", "data.truncation=error"])


def test_an_answer_that_the_agent_cut_short_goes_on_in_its_next_turn():
    async def agent(access, sample):
        messages = [*sample["messages"]]
        choice = await say(access, messages, max_tokens=2)
        assert choice.finish_reason == "length"
        await say(access, [*messages, {"role": "user", "content": "more"}])

    output = run(agent, "abcdef…", "ghi")
    assert output.stop_reason == "completed"
    assert sum(output.response_mask) == 2 + len("ghi") + 1


def test_a_stream_holds_the_same_message_and_its_numbers():
    async def agent(access, sample):
        options = {"include_usage": True}
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        async with client_of(access) as client:
            stream = await client.chat.completions.create(
                model="any", messages=sample["messages"], stream=True, stream_options=options, tools=[tool]
            )
            chunks = [chunk async for chunk in stream]
        (call,) = chunks[0].choices[0].delta.tool_calls
        assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "add", {"a": 1, "b": 2})
        assert chunks[1].choices[0].finish_reason == "tool_calls"
        assert chunks[2].usage.completion_tokens == len(build_tokenizer().encode(CALL, add_special_tokens=False)) + 1

    run(agent, CALL)


REFUSED = {
    "n": (2, "n is not supported with this value"),
    "stop": (["Observation:"], "stop is not supported with this value"),
    "logprobs": (True, "logprobs is not supported"),
    "tool_choice": ("required", "tool_choice is not supported"),
    "response_format": ({"type": "json_object"}, "response_format is not supported"),
    "max_tokens": (0, "max_tokens=0 is not a positive number"),
    "best_of_all": (1, "best_of_all is not supported at all"),
    "tools": ([{"type": "function", "function": {}}], r"tools\[0\]\['function'\]\['name'\]: Field required"),
    "messages": (
        [{"role": "tool", "tool_call_id": "x", "content": ""}],
        "answers 'x', which is the id of no call before",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_request_that_asks_for_what_is_not_done_is_refused_by_name(key):
    value, message = REFUSED[key]

    async def agent(access, sample):
        body = {"model": "m", "messages": sample["messages"], key: value}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {access.api_key}"}) as client:
            answer = await client.post(f"{access.base_url}/chat/completions", json=body)
        assert answer.status_code == 400
        raise ValueError(answer.json()["error"]["message"])

    with pytest.raises(AgentCodeError, match=message):
        run(agent, "never")


def test_pictures_in_a_request_are_refused_by_name():
    async def agent(access, sample):
        await ask(access, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}])

    with pytest.raises(AgentCodeError, match="messages\\[0\\] has a part of type 'image_url', and only text"):
        run(agent, "never")


def test_a_key_is_of_one_sample_and_ends_with_it():
    kept = []

    async def agent(access, sample):
        kept.append(access)
        with pytest.raises(openai.AuthenticationError, match="belongs to no sample"):
            await ask(module.ModelAccess(access.base_url, "sk-another"), sample["messages"])
        async with client_of(access) as client:
            assert [model.id for model in (await client.models.list()).data] == [access.model]
            with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not served"):
                await client.embeddings.create(model="m", input="x")
        await ask(access, sample["messages"])

    run(agent, "3")
    with pytest.raises(httpx.ConnectError):  # nobody listens
        httpx.get(kept[0].base_url)


def test_conversations_of_many_agents_at_once_do_not_mix():
    class Echo:
        """Says what the prompt said, late ones first."""

        async def generate(self, request_id, *, prompt_ids, sampling_params):
            text = tokenizer.decode(prompt_ids)
            number = int(text.split("number ")[-1].split("!")[0])
            await asyncio.sleep(0.001 * (9 - number))
            return await ScriptedManager(tokenizer, f"I am {number}").generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
            )

    async def agent(access, sample):
        number = sample["index"]
        answer = await ask(access, [{"role": "user", "content": f"number {number}!"}])
        assert answer.choices[0].message.content == f"I am {number}"
        return number

    async def all_of_them():
        def one(number):
            loop = OpenAIAgentLoop(
                trainer_config=DictConfigWrap(config_of()),
                server_manager=Echo(),
                tokenizer=tokenizer,
                agent=f"{HERE}:the_agent",
            )
            return loop.run(SamplingOptions(max_tokens=99).as_dict(), raw_prompt=PROMPT, index=number)

        return await asyncio.gather(*map(one, range(9)))

    tokenizer, the_agent.does = build_tokenizer(), agent
    assert [output.reward_score for output in asyncio.run(all_of_them())] == list(range(9))


@pytest.mark.parametrize("with_log_probs", [True, False])
@pytest.mark.parametrize("after", [0, 1], ids=["before an answer", "after an answer"])
def test_a_failure_of_the_agent_is_named_or_gets_the_reward_zero(after, with_log_probs):
    async def agent(access, sample):
        for _ in range(after):
            await ask(access, sample["messages"])
        raise RuntimeError("the sandbox is gone")

    with pytest.raises(AgentCodeError, match="the agent failed: RuntimeError: the sandbox is gone"):
        run(agent, "3")
    manager = ScriptedManager(build_tokenizer(), "3", log_probs=with_log_probs)
    output = run(agent, manager=manager, on_failure="zero", log_probs=with_log_probs)
    assert (output.reward_score, output.metrics["agent_failed"]) == (0.0, 1)
    assert bool(output.response_ids) == bool(after)
    assert output.prompt_ids
    assert (output.response_logprobs is None) == (not with_log_probs)


def test_an_agent_that_ends_the_process_ends_its_sample_alone():
    def agent(access, sample):
        sys.exit("usage: agent.py")

    async def awaited(access, sample):
        return agent(access, sample)

    the_blocking_agent.does = agent
    for how in ({"does": awaited}, {"does": None, "agent": f"{HERE}:the_blocking_agent"}):
        with pytest.raises(AgentCodeError, match="the agent failed: SystemExit: usage: agent.py"):
            run(**how)


def test_an_agent_that_hangs_ends_at_its_deadline_and_its_request_is_cancelled():
    cancelled = []

    class Hangs:
        async def generate(self, request_id, *, prompt_ids, sampling_params):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(request_id)

    async def agent(access, sample):
        await ask(access, sample["messages"])

    with pytest.raises(AgentCodeError, match="did not end within timeout_s=0.5"):
        run(agent, manager=Hangs(), timeout_s=0.5)
    assert len(cancelled) == 1


def test_an_error_of_the_engine_is_not_the_agents():
    class Dead:
        async def generate(self, request_id, *, prompt_ids, sampling_params):
            raise ReplicaDied("no engine is left")

    async def agent(access, sample):
        with pytest.raises(openai.InternalServerError):
            await ask(access, sample["messages"])
        return 1.0

    with pytest.raises(ReplicaDied, match="no engine is left"):
        run(agent, manager=Dead(), on_failure="zero")


def plain_agent(access, sample):
    """As agents are that nobody wrote for training."""
    client = openai.OpenAI(base_url=access.base_url, api_key=access.api_key)
    with client:
        return client.chat.completions.create(model="m", messages=sample["messages"]).choices[0].message.content


def test_a_function_that_blocks_runs_in_a_thread():
    output = run(None, "3", agent=f"{HERE}:plain_agent")
    assert dict(output.extra_fields) == {"agent_output": "3"}


PROGRAM = """
import json, openai, sys
sample = json.load(sys.stdin)
answer = openai.OpenAI().chat.completions.create(model="m", messages=sample["messages"])
print(answer.choices[0].message.content, sample["extra_info"]["n"])
"""


def test_a_program_gets_the_endpoint_from_its_environment(tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    output = run(None, "3", agent=None, command=f"{{python}} {tmp_path}/agent.py")
    assert dict(output.extra_fields) == {"agent_output": "3 3\n"}


def test_a_proxy_of_the_environment_is_not_asked_for_the_endpoint(tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    (tmp_path / "agent.py").write_text(PROGRAM)
    assert run(None, "3", agent=None, command=f"{{python}} {tmp_path}/agent.py").extra_fields
    assert run(None, "3", agent=f"{HERE}:plain_agent").extra_fields
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1"


def test_a_program_that_fails_is_named_and_leaves_nothing(tmp_path):
    (tmp_path / "agent.sh").write_text(f"setsid sleep 600 >&- 2>&- & echo $! > {tmp_path}/pid; echo why >&2; exit 3")
    with pytest.raises(AgentCodeError, match="agent.sh' ended with exit code 3: why"):
        run(None, agent=None, command=f"sh {tmp_path}/agent.sh")
    child = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(timeout=60)


SERVER = """
import json, sys, threading, urllib.request

writing = threading.Lock()  # print writes a line and its end one after the other

def answer(asked):
    headers = {"Authorization": "Bearer " + asked["api_key"], "Content-Type": "application/json"}
    body = json.dumps({"model": "m", "messages": asked["sample"]["messages"]}).encode()
    request = urllib.request.Request(asked["base_url"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    with writing:
        print(json.dumps({"id": asked["id"], "result": {"score": float(said)}}), flush=True)

for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("cancel"):
        print("cancelled", file=sys.stderr)
        sys.exit(7)
    elif asked["sample"]["do"] == "answer":
        threading.Thread(target=answer, args=[asked]).start()
    elif asked["sample"]["do"] == "fail":
        print(json.dumps({"id": asked["id"], "error": "the sandbox is gone"}), flush=True)
    elif asked["sample"]["do"] == "chatter":
        print("Loading ...", flush=True)
    elif asked["sample"]["do"] == "hang":
        threading.Event().wait()
    elif asked["sample"]["do"] == "babble":
        print(json.dumps({"id": [], "result": 1}), flush=True)
    elif asked["sample"]["do"] == "die":
        print("out of memory", file=sys.stderr)
        sys.exit(3)
"""


@pytest.fixture
def served(tmp_path):
    """What agents of one program come to that do as they are told, in the order of their end."""
    (tmp_path / "server.py").write_text(SERVER)
    tokenizer, config = build_tokenizer(), config_of()

    def all_of(*told, timeout_s=600.0):
        manager = ScriptedManager(tokenizer, *map(str, range(9)))

        async def one(do):
            loop = OpenAIAgentLoop(
                trainer_config=DictConfigWrap(config),
                server_manager=manager,
                tokenizer=tokenizer,
                server=f"{{python}} {tmp_path}/server.py",
                timeout_s=timeout_s,
            )
            return (await loop.run(SamplingOptions(max_tokens=99).as_dict(), raw_prompt=PROMPT, do=do)).reward_score

        async def run_all():
            try:
                return [await asyncio.gather(*map(one, group), return_exceptions=True) for group in told]
            finally:
                await agent_program.close_programs()

        return asyncio.run(run_all())

    return all_of


def test_one_program_runs_the_agents_of_many_samples_at_once(served):
    (scores,) = served(["answer"] * 5)
    assert sorted(scores) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_an_error_of_a_programs_agent_is_of_its_sample_alone(served):
    ((failed, score),) = served(["fail", "answer"])
    assert "the sandbox is gone" in str(failed)
    assert score == 0.0


def test_a_program_that_ends_is_named_and_starts_again_for_the_next_sample(served):
    (died, scores) = served(["die"], ["answer"])
    assert "server.py' ended with exit code 3: out of memory" in str(died[0])
    assert scores == [0.0]


def test_a_program_that_prints_something_else_is_named(served):
    for (failed,) in served(["chatter"], ["babble"]):
        assert "answered what is no line of the protocol" in str(failed)


def test_a_program_that_reads_nothing_holds_no_sample_beyond_its_deadline(served):
    """Also where its pipe is full."""
    ((*late,),) = served(["hang" if not number else " " * number * 2**20 for number in range(3)], timeout_s=3.0)
    assert all("did not end within timeout_s=3" in str(each) for each in late)


def test_a_program_is_told_when_a_sample_is_over(served, capsys):
    ((late,),) = served(["wait"], timeout_s=2.0)
    assert "did not end within timeout_s=2" in str(late)
    assert capsys.readouterr().err == "cancelled\n"


BAD_OPTIONS = {
    "needs one of agent": {},
    "not \\['agent', 'command'\\]": {"agent": "a:b", "command": "x"},
    "there is no program nowhere": {"server": "nowhere agent.py"},
    "command='a \"b' is not a command line": {"command": 'a "b'},
    "no function 'missing'": {"agent": f"{HERE}:missing"},
    "cannot take \\(access, sample\\)": {"agent": f"{HERE}:client_of"},
    "timeout_s=0 is not a positive": {"command": "sh", "timeout_s": 0},
    "conversations='all' is none of one, last": {"command": "sh", "conversations": "all"},
    "on_failure='skip' is none of raise, zero": {"command": "sh", "on_failure": "skip"},
    "command='' is not a command line": {"command": ""},
    "unknown 'timeout'": {"command": "sh", "timeout": 3},
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_wrong_options_are_errors_on_the_driver(message):
    loops = {"mine": LoopEntry("verl.experimental.agent_loop.openai_agent:OpenAIAgentLoop", BAD_OPTIONS[message])}
    with pytest.raises(ConfigError, match=message):
        check_loop("mine", loops)
