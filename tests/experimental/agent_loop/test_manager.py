import asyncio
import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from tests.checkpoint_engine.fakes import soon
from tests.experimental.agent_loop.fakes import ConstantLoop
from tests.experimental.agent_loop.scripted_server import ScriptedServer, said
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopError, AgentLoopManager, AgentLoopWorker, register
from verl.experimental.agent_loop import worker as worker_module
from verl.experimental.agent_loop.errors import AgentCodeError, AgentLoopTimeout
from verl.experimental.agent_loop.registry import known_loops
from verl.experimental.agent_loop.worker import default_loop
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.utils.config import ConfigError
from verl.utils.failures import in_one_line
from verl.utils.progress import Progress
from verl.utils.user_code import UserCodeError

AGENT = "actor_rollout_ref.rollout.agent"
FAKES = "tests.experimental.agent_loop.fakes"


def prompts(*texts, validate=False, **columns):
    messages = [[{"role": "user", "content": text}] for text in texts]
    meta = {"validate": True} if validate else {}
    return DataProto.from_dict({}, {"raw_prompt": messages, **columns}, meta)


class PidLoop(ConstantLoop):
    """Its token is the process that ran it."""

    async def run(self, sampling_params, **kwargs):
        self.token = os.getpid()
        return await super().run(sampling_params, **kwargs)


class RaisingLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        raise KeyError("answer")


class TellingLoop(ConstantLoop):
    """`dies` ends its worker the first time, after `first` is finished; `last` waits for a file."""

    async def run(self, sampling_params, **kwargs):
        name, directory = kwargs["raw_prompt"][0]["content"], Path(kwargs["directory"])
        goes_on = directory / "go on"
        (directory / f"{name} {uuid.uuid4().hex} began").touch()
        if name == "dies" and not goes_on.exists():
            await asyncio.to_thread(soon, (directory / "first finished").exists)
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "last":
            await asyncio.to_thread(soon, goes_on.exists)
        output = await super().run(sampling_params, **kwargs)
        (directory / f"{name} finished").touch()
        return output


class SuicidalLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(60)


@pytest.fixture(scope="module")
def server(ray_cluster):
    handle = ray.remote(ScriptedServer).options(num_cpus=0.01).remote()
    yield handle
    ray.kill(handle)


@pytest.fixture(autouse=True)
def echo(server):
    ray.get(server.reset.remote([]))


@pytest.fixture(scope="module")
def manager(server, tokenizer_path):
    """Two workers over one echoing server."""
    register("pid")(PidLoop)
    register("suicidal")(SuicidalLoop)
    register("raising")(RaisingLoop)
    config = load_config([f"{AGENT}.num_workers=2", "data.max_prompt_length=16", "data.max_response_length=4"])
    with AgentLoopManager(config, [server], tokenizer_path) as manager:
        yield manager


@pytest.fixture(scope="module")
def tool_manager(server, tokenizer_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.yaml"
    path.write_text(f"tools: [{{class_name: '{FAKES}:AddTool'}}]")
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    lengths = ["data.max_prompt_length=600", "data.max_response_length=12000"]
    config = load_config([*lengths, f"{multi_turn}.enable=true", f"{multi_turn}.tool_config_path={path}"])
    with AgentLoopManager(config, [server], tokenizer_path) as manager:
        yield manager


def seen(server):
    return ray.get(server.seen.remote())


def test_every_prompt_gets_its_response_in_order(manager, tokenizer):
    texts = ["a", "bb", "c", "d", "e"]
    data = manager.generate_sequences(prompts(*texts, uid=list("vwxyz")))
    assert tokenizer.batch_decode(data.batch["responses"][:, :3]) == [text[0] * 3 for text in texts]
    assert data.batch["prompts"].shape == (5, 16)
    assert data.batch["response_mask"].tolist() == [[1, 1, 1, 0]] * 5
    assert data.batch["rollout_versions"].tolist() == [[7, 7, 7, -1]] * 5
    assert data.batch["rollout_log_probs"].dtype == torch.float32
    assert tokenizer.decode(data.batch["prompts"][1], skip_special_tokens=False).endswith(
        "<|user|>bb<|end|><|assistant|>"
    )
    assert data.non_tensor_batch["__num_turns__"].tolist() == [2] * 5
    assert data.non_tensor_batch["__stop_reason__"].tolist() == ["completed"] * 5
    assert sorted(data.non_tensor_batch) == [
        *("__extra_fields__", "__num_turns__", "__replicas__", "__reward_score__", "__stop_reason__")
    ]


def test_timing_says_how_long_and_how_often(manager):
    timing = manager.generate_sequences(prompts("a", "b", "c")).meta_info["timing"]
    assert (
        0 < timing["agent_loop/generate_s/min"] <= timing["agent_loop/generate_s/max"] <= timing["agent_loop/total_s"]
    )
    assert timing["agent_loop/retries"] == timing["agent_loop/continuations"] == 0


def test_the_result_can_join_the_batch_it_came_from(manager):
    batch = prompts("a", "b", uid=["0", "1"])
    batch = batch.union(manager.generate_sequences(batch))
    assert len(batch) == 2
    assert "responses" in batch.batch.keys()  # noqa: SIM118 - a TensorDict iterates rows


def test_training_and_validation_sample_as_configured(manager, server):
    manager.generate_sequences(prompts("train"))
    data = manager.generate_sequences(prompts("validate", validate=True))
    train, validate = [sampling for _, sampling, _ in seen(server)["calls"]]
    assert (train.temperature, train.max_tokens, train.logprobs) == (1.0, 4, True)
    assert (validate.temperature, validate.max_tokens) == (0.0, 4)
    assert len(data) == 1


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        f"<tool_call>{'[' * 10_000}</tool_call>",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call></tool_call><tool_call>',
    ],
    ids=["a call", "deep", "half a surrogate pair", "half tags"],
)
def test_a_batch_goes_on_whatever_the_policy_writes_to_its_tools(tool_manager, server, tokenizer, written):
    said_ids = [*tokenizer.encode(written, add_special_tokens=False), tokenizer.eos_token_id]
    ray.get(server.reset.remote([said(said_ids), said([*tokenizer.encode("ok"), tokenizer.eos_token_id])]))
    data = tool_manager.generate_sequences(prompts("1+2="))
    assert data.non_tensor_batch["__stop_reason__"].tolist() == ["completed"]
    response = tokenizer.decode(data.batch["responses"][0])
    first, second = seen(server)["calls"]
    assert second[0][: len(first[0])] == first[0]
    assert second[0][len(first[0]) :][: len(said_ids)] == said_ids
    assert response.startswith(f"{written}<|end|><|tool|>")
    assert "<|end|><|assistant|>ok<|end|>" in response


def test_samples_are_spread_over_the_workers_and_agent_name_selects_the_loop(manager, tokenizer):
    names = ["pid", "pid", "single_turn_agent", "pid", None]
    data = manager.generate_sequences(prompts(*"abcde", agent_name=names))
    first, second, _, other, _ = data.batch["responses"][:, 0].tolist()
    assert len({first, other, os.getpid()}) == 3
    assert first == second
    assert tokenizer.batch_decode(data.batch["responses"][[2, 4], :1]) == ["c", "e"]


@pytest.mark.parametrize("name", ["pidd", "no.such.module:Loop"])
def test_an_unknown_agent_name_is_an_error_before_anything_is_generated(manager, server, name):
    with pytest.raises(ConfigError, match=r"pidd|no\.such\.module"):
        manager.generate_sequences(prompts("a", "b", agent_name=["single_turn_agent", name]))
    assert seen(server)["calls"] == []


def test_the_first_failure_surfaces_at_once_with_its_own_traceback_and_its_sample(manager, server):
    ray.get(server.reset.remote([], at_once=4))  # what had not reached the server could not be cancelled on it
    texts = ["hang!", "hang!", "hang!", "fail!"]
    with pytest.raises(AgentLoopError) as caught:
        manager.generate_sequences(prompts(*texts, index=[10, 11, 12, 13], uid=list("abcd")))
    message = str(caught.value)
    assert "sample 3 (index=13, uid=d): agent loop 'single_turn_agent' failed" in message
    assert "RuntimeError: the engine said no" in message
    assert "scripted_server.py" in message
    assert soon(lambda: seen(server)["cancelled"] == 3), "what nobody waits for is cancelled on the server"


def test_what_a_loop_of_the_users_own_raises_can_be_told_in_one_line(manager):
    with pytest.raises(AgentCodeError) as caught:
        manager.generate_sequences(prompts("a", "b", uid=list("ab"), agent_name=["single_turn_agent", "raising"]))
    assert in_one_line(caught.value) == "sample 1 (uid=b): agent loop 'raising' failed: KeyError: 'answer'"


def test_what_an_engine_raises_is_no_fault_of_the_users_code(manager):
    with pytest.raises(AgentLoopError) as caught:
        manager.generate_sequences(prompts("fail!"))
    assert not isinstance(caught.value, UserCodeError)


def test_after_a_failure_the_manager_goes_on(manager):
    with pytest.raises(AgentLoopError):
        manager.generate_sequences(prompts("fail!"))
    assert len(manager.generate_sequences(prompts("a"))) == 1


def test_a_sample_without_messages_is_named_and_told_what_to_do(manager):
    with pytest.raises(AgentLoopError, match="sample 0.*data.return_raw_chat=true"):
        manager.generate_sequences(DataProto.from_dict({}, {"index": [1]}))


def test_token_ids_of_the_data_set_are_taken_as_they_are(manager):
    data = manager.generate_sequences(prompts("a", prompt_ids=[[40, 41]]))
    assert data.batch["prompts"][0, -3:].tolist() == [256, 40, 41]


def test_a_prompt_longer_than_the_limit_is_named(manager):
    with pytest.raises(AgentLoopError, match="sample 1: .*53 tokens exceeds data.max_prompt_length=16"):
        manager.generate_sequences(prompts("a", "b" * 50))


def test_no_samples_are_an_error(manager):
    with pytest.raises(ValueError, match="raw_prompt"):
        manager.generate_sequences(DataProto())


def test_a_worker_that_dies_fails_the_batch_at_once(server, tokenizer_path):
    register("suicidal")(SuicidalLoop)
    config = load_config([f"{AGENT}.num_workers=2"])
    with AgentLoopManager(config, [server], tokenizer_path) as manager, pytest.raises(RayActorError):
        manager.generate_sequences(prompts("hang!", "b", agent_name=["single_turn_agent", "suicidal"]))


def test_after_a_worker_died_the_batch_takes_what_the_others_finished_and_were_about_to(
    server, tokenizer_path, tmp_path
):
    """Two of three finish: one before the death, one while the dead one is started again."""
    register("telling")(TellingLoop)
    names = ["telling", "telling", "telling"]
    batch = prompts("first", "dies", "last", agent_name=names, directory=[str(tmp_path)] * 3)
    with AgentLoopManager(load_config([f"{AGENT}.num_workers=3"]), [server], tokenizer_path) as manager:
        with pytest.raises(RayActorError):
            manager.generate_sequences(batch)
        (tmp_path / "go on").touch()
        assert manager.set_servers([server]) == 1
        data = manager.generate_sequences(batch)
        before = sorted(path.name.split()[0] for path in tmp_path.glob("* began"))
        assert (len(data), before) == (3, ["dies", "dies", "first", "last"])
        manager.generate_sequences(batch)  # of a batch that was generated nothing is taken
        assert len(list(tmp_path.glob("first * began"))) == 2


def test_after_its_server_died_a_batch_takes_what_it_had_and_goes_on_after_the_last_token(
    tokenizer_path, tokenizer, start_server
):
    told = replace(said([7, 8, 9], "died", version=1), log_probs=[-1.0, -2.0, -3.0])
    first, second = start_server(said([5], version=1), told), start_server(said([10], version=2))
    batch = prompts("a", "b", uid=["one", "two"])
    config = load_config([f"{AGENT}.num_workers=1", f"{AGENT}.max_concurrency=1", "data.max_response_length=4"])
    with AgentLoopManager(config, [first], tokenizer_path) as manager:
        background = ThreadPoolExecutor(1)
        failing = background.submit(manager.generate_sequences, batch)
        assert soon(lambda: any(3 in known.values() for known in seen(first)["asked"]))  # so it has been told
        ray.kill(first)
        with pytest.raises(AgentLoopError, match="none of 1 rollout servers"):
            failing.result()
        manager.set_servers([second])
        data = manager.generate_sequences(batch)
        ((prompt, sampling, _),) = seen(second)["calls"]
        assert (prompt[-3:], sampling.max_tokens) == ([7, 8, 9], 1)
        assert data.batch["responses"].tolist() == [[5, *[tokenizer.pad_token_id] * 3], [7, 8, 9, 10]]
        assert data.batch["rollout_log_probs"][1].tolist() == [-1.0, -2.0, -3.0, -0.5]
        assert data.batch["rollout_versions"][1].tolist() == [1, 1, 1, 2]
        assert data.meta_info["timing"]["agent_loop/taken_over_tokens"] == 4
        manager.generate_sequences(batch)  # of a batch that was generated nothing is taken
        assert len(seen(second)["calls"]) == 3


def test_a_worker_in_the_place_of_one_that_died_takes_its_answers_from_the_servers(
    tokenizer_path, tokenizer, start_server
):
    told = replace(said([7, 8, 9], "died", version=1), log_probs=[-1.0, -2.0, -3.0])
    server, other = start_server(said([5], version=1), told, said([10], version=2)), start_server()
    ray.kill(other)  # one that cannot say what it kept
    batch = prompts("a", "b", uid=["one", "two"])
    config = load_config([f"{AGENT}.num_workers=1", f"{AGENT}.max_concurrency=1", "data.max_response_length=4"])
    with AgentLoopManager(config, [server], tokenizer_path) as manager:
        failing = ThreadPoolExecutor(1).submit(manager.generate_sequences, batch)
        assert soon(lambda: len(seen(server)["calls"]) == 2)
        ray.kill(manager.workers[0])
        with pytest.raises(RayActorError):
            failing.result()
        assert manager.set_servers([server, other]) == 1
        assert soon(lambda: seen(server)["cancelled"] == 1)  # nobody waits for it any more
        data = manager.generate_sequences(batch)
        prompt, sampling, _ = seen(server)["calls"][2]
        assert (prompt[-3:], sampling.max_tokens) == ([7, 8, 9], 1)
        assert data.batch["responses"].tolist() == [[5, *[tokenizer.pad_token_id] * 3], [7, 8, 9, 10]]
        assert data.batch["rollout_log_probs"][1].tolist() == [-1.0, -2.0, -3.0, -0.5]
        assert data.batch["rollout_versions"][1].tolist() == [1, 1, 1, 2]
        assert data.meta_info["timing"]["agent_loop/taken_over_tokens"] == 4
        # Of samples that are complete servers keep nothing.
        assert soon(lambda: ray.get(server.take_calls.remote("agent-loop-worker-0")) == [])


def test_a_batch_that_is_asked_for_once_more_is_generated_once_until_it_is_complete(manager, server):
    """As another rollouter does, in the place of one that died."""
    worker = manager.workers[0]
    batch = prompts("hang!", "a", uid=["one", "two"])
    batch.meta_info["validate"] = False
    asked = [worker.generate_sequences.remote(batch, 0)]
    assert soon(lambda: len(seen(server)["calls"]) == 2)
    asked += [worker.generate_sequences.remote(batch, 0), worker.generate_sequences.remote(batch[1:], 1)]
    ray.get(asked[2])  # another batch
    ray.get(server.give_up.remote(said([9])))
    one, other = ray.get(asked[:2])
    assert one.batch["responses"].tolist() == other.batch["responses"].tolist()
    assert len(seen(server)["calls"]) == 3
    batch.meta_info["keep"] = True
    one, other = (ray.get(worker.generate_sequences.remote(batch, 0)) for _ in range(2))
    assert one.batch["responses"].tolist() == other.batch["responses"].tolist()
    assert len(seen(server)["calls"]) == 5
    ray.get(worker.forget.remote(["one"]))
    ray.get(worker.generate_sequences.remote(batch, 0))
    assert len(seen(server)["calls"]) == 7


def test_of_a_validation_that_failed_nothing_is_taken_as_the_next_one_may_have_other_weights(
    tokenizer_path, start_server
):
    first, second = start_server(said([5]), "die"), start_server(said([10]))
    batch = prompts("a", "b", uid=["0", "1"], validate=True)
    with AgentLoopManager(load_config([f"{AGENT}.max_concurrency=1"]), [first], tokenizer_path) as manager:
        with pytest.raises(AgentLoopError, match="none of 1 rollout servers"):
            manager.generate_sequences(batch)
        manager.set_servers([second])
        assert manager.generate_sequences(batch).batch["responses"][:, 0].tolist() == [10, 10]


def test_a_sample_with_a_seed_begins_again_after_its_server_died(tokenizer_path, start_server):
    first, second = start_server(said([5]), said([6], "aborted"), "die"), start_server(said([10]))
    batch = prompts("a", "b", uid=["one", "two"])
    seeded = ["trainer.full_determinism=true", "data.max_response_length=4", f"{AGENT}.max_concurrency=1"]
    with AgentLoopManager(load_config([f"{AGENT}.num_workers=1", *seeded]), [first], tokenizer_path) as manager:
        with pytest.raises(AgentLoopError, match="none of 1 rollout servers"):
            manager.generate_sequences(batch)
        manager.set_servers([second])
        manager.generate_sequences(batch)
        assert [sampling.max_tokens for _, sampling, _ in seen(second)["calls"]] == [4, 4]


def end(worker):
    """Returns when it is known to be dead."""
    ray.kill(worker, no_restart=True)
    with pytest.raises(RayActorError):
        while True:
            ray.get(worker.ready.remote())


class DiesAsItStarts(AgentLoopManager):
    """Workers that are started again are put on a host that is gone, as often as `deaths` says."""

    deaths = 0

    def _start(self, rank, **how):
        worker = super()._start(rank, **how)
        if self.deaths:
            self.deaths -= 1
            end(worker)
        return worker


def test_a_worker_whose_place_is_lost_as_it_starts_again_is_started_elsewhere(server, tokenizer_path, tokenizer):
    with DiesAsItStarts(load_config([f"{AGENT}.num_workers=2"]), [server], tokenizer_path) as manager:
        end(manager.workers[1])
        manager.deaths = 2
        assert manager.set_servers([server]) == 1
        data = manager.generate_sequences(prompts("a", "b"))
        assert tokenizer.batch_decode(data.batch["responses"][:, :1]) == ["a", "b"]


def test_a_worker_that_dies_at_every_start_ends_the_run(server, tokenizer_path):
    with DiesAsItStarts(load_config([]), [server], tokenizer_path) as manager:
        end(manager.workers[0])
        manager.deaths = 100
        with pytest.raises(RayActorError):
            manager.set_servers([server])
        assert manager.deaths > 90


def test_a_batch_that_takes_too_long_names_the_workers(server, tokenizer_path, monkeypatch):
    with AgentLoopManager(load_config([]), [server], tokenizer_path) as manager:
        monkeypatch.setattr(manager, "_deadline_s", lambda _num_samples: 2.0)  # before that of a request
        with pytest.raises(AgentLoopTimeout, match="not done within 2 s: agent-loop-worker-0"):
            manager.generate_sequences(prompts("hang!"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{AGENT}.default_agent_loop=singel_turn_agent"], "unknown agent loop 'singel_turn_agent'"),
        ([f"{AGENT}.agent_loop_config_path=/no/loops.yaml"], "/no/loops.yaml cannot be read"),
        (
            ["actor_rollout_ref.rollout.multi_turn.tool_config_path=/no/tools.yaml"],
            "/no/tools.yaml cannot be read",
        ),
    ],
)
def test_what_cannot_be_loaded_is_an_error_before_any_actor_starts(overrides, message):
    with pytest.raises(ConfigError, match=message):
        AgentLoopManager(load_config(overrides), [], "/nowhere")


def worker_over(server, tokenizer_path, *overrides):
    config = load_config(["data.max_prompt_length=16", "data.max_response_length=4", *overrides])
    loops = known_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    return AgentLoopWorker(config=config, servers=[server], tokenizer_path=str(tokenizer_path), loops=loops, rank=0)


async def test_no_more_samples_are_in_flight_than_max_concurrency(server, tokenizer_path):
    ray.get(server.reset.remote([], at_once=3))
    worker = worker_over(server, tokenizer_path, f"{AGENT}.max_concurrency=3")
    samples = prompts(*"abcdefghij")
    samples.meta_info["validate"] = False
    data = await worker.generate_sequences(samples, 0)
    assert len(data) == 10
    assert seen(server)["most_in_flight"] == 3


async def test_of_complete_samples_the_oldest_are_dropped_beyond_the_bound(server, tokenizer_path, monkeypatch, caplog):
    worker, asked = worker_over(server, tokenizer_path), []

    async def generates(number):
        """Whether it does: what it has kept it returns."""
        batch = prompts("a", uid=[f"uid {number}"])
        batch.meta_info |= {"validate": False, "keep": True}
        before = len(seen(server)["calls"])
        asked.append(await worker.generate_sequences(batch, number))
        return len(seen(server)["calls"]) > before

    ray.get(server.reset.remote([]))
    assert await generates(0)
    monkeypatch.setattr(worker_module, "MOST_KEPT_NBYTES", 2 * asked[0].nbytes)
    assert [await generates(number) for number in (1, 2)] == [True, True]
    assert "complete samples take over" in caplog.text
    assert [await generates(number) for number in (2, 1)] == [False, False]
    assert await generates(0)


class GatedLoop(ConstantLoop):
    """Its second sample waits until the first is done and somebody has looked."""

    looked: asyncio.Event

    async def run(self, sampling_params, **kwargs):
        if kwargs["raw_prompt"][0]["content"] == "b":
            await self.looked.wait()
        return await super().run(sampling_params, **kwargs)


async def test_a_worker_tells_how_many_answers_are_finished(server, tokenizer_path):
    GatedLoop.looked = asyncio.Event()
    register("gated")(GatedLoop)
    worker = worker_over(server, tokenizer_path, f"{AGENT}.default_agent_loop=gated")
    samples = prompts("a", "b")
    samples.meta_info["validate"] = True
    assert await worker.progress(validate=True) is None
    generating = asyncio.create_task(worker.generate_sequences(samples, 0))
    while (progress := await worker.progress(validate=True)) is None or not progress.done:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert progress == Progress(done=1, total=2, unit="answers", tokens=1)
    assert await worker.progress(validate=False) is None
    GatedLoop.looked.set()
    await generating
    assert await worker.progress(validate=True) is None


async def test_a_loop_of_the_users_own_from_yaml_is_the_default(server, tokenizer_path, tmp_path):
    path = tmp_path / "loops.yaml"
    path.write_text(f"- {{name: mine, _target_: {FAKES}.ConstantLoop, token: 5}}")
    worker = worker_over(
        server, tokenizer_path, f"{AGENT}.agent_loop_config_path={path}", f"{AGENT}.default_agent_loop=mine"
    )
    samples = prompts("a")
    samples.meta_info["validate"] = False
    data = await worker.generate_sequences(samples, 0)
    assert data.batch["responses"].tolist() == [[5, *[worker._tokenizer.pad_token_id] * 3]]


def test_a_tokenizer_without_a_chat_template_is_an_error(server, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no chat template: set actor_rollout_ref.model.custom_chat_template"):
        worker_over(server, tmp_path)


@pytest.mark.parametrize(
    ("named", "tools", "used"),
    [
        ("single_turn_agent", "false", "single_turn_agent"),
        ("single_turn_agent", "true", "tool_agent"),
        ("mine", "true", "mine"),
    ],
)
def test_the_loop_that_is_named_is_used_with_tools_too(named, tools, used):
    multi_turn = "actor_rollout_ref.rollout.multi_turn.enable"
    assert default_loop(load_config([f"{AGENT}.default_agent_loop={named}", f"{multi_turn}={tools}"])) == used
