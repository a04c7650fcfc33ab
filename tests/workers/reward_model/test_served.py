"""A reward model behind HTTP: what it says, who gets its address, and how it ends."""

import errno
import http.client
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.processes import wait_until_gone
from tests.sglang_on_cpu import NEEDS_SGLANG, PACKAGE, STAND_INS
from tests.workers.reward_model import head
from verl.checkpoint_engine.engines.leftovers import shared_memory_of
from verl.trainer.config.loader import load_config
from verl.trainer.config.validate import problems_of
from verl.trainer.fleet.counts import num_reward_engines
from verl.trainer.fleet.reward_models import reward_function
from verl.utils.builtin import make_tiny_model
from verl.utils.config import ConfigError
from verl.utils.device import any_device
from verl.utils.reward_score.served import AskedFunction, RewardModelError, ScoredByModel, next_address
from verl.workers.config.reward_model import RewardRolloutConfig
from verl.workers.reward_model import RewardModelServer, ServerSpec
from verl.workers.reward_model.engines import ENGINES
from verl.workers.rollout.errors import RolloutError

MESSAGES = [{"role": "user", "content": "2+2="}]


def spec(model: Path, log: Path, **changes) -> ServerSpec:
    return ServerSpec(
        name="reward_model_0",
        model=str(model),
        names=("judge", str(model)),
        scores=True,
        trust_remote_code=False,
        config=RewardRolloutConfig(dtype="float32", max_model_len=256, max_num_seqs=8, cpu_kvcache_gib=0.05, **changes),
        device="cpu",
        can_sleep=False,
        log=log,
        environment={"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )


def take_port(server: RewardModelServer) -> int | None:
    """As soon as it has chosen one: the number of the error, if that does not work."""
    while not server._port:
        time.sleep(0.01)
    with socket.socket() as other:
        try:
            other.bind((server._host, server._port))
        except OSError as exc:
            return exc.errno
    return None


def family_of(server: RewardModelServer) -> list[psutil.Process]:
    process = psutil.Process(server._process.pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.vllm
@pytest.mark.cells(3)
def test_an_engine_gives_the_scores_of_transformers_and_ends_when_it_is_told_to(tmp_path):
    model = head.make(tmp_path / "model")
    of_others = shared_memory_of(os.getpid())
    server = RewardModelServer(spec(model, tmp_path / "engine.log"))
    addresses = tmp_path / "addresses.json"
    taking = ThreadPoolExecutor(1).submit(take_port, server)
    try:
        addresses.write_text(json.dumps([server.start(600)]))
        function = ScoredByModel(addresses, 120.0)
        for answer in ("4", "five, I think"):
            given = function(
                data_source="x", solution_str=answer, ground_truth="4", extra_info={"raw_prompt": MESSAGES}
            )
            expected = head.score(model, [*MESSAGES, {"role": "assistant", "content": answer}])
            assert given == pytest.approx(expected, abs=1e-4)
        assert taking.result() == errno.EADDRINUSE, "its port was free while it started"
        directory = server._leftovers.directory
        assert list(directory.glob("vllm_dist_*")), "what vLLM leaves is where it will be removed"
        memory, engine = shared_memory_of(os.getpid()) - of_others, family_of(server)
        assert any("EngineCore" in process.name() for process in engine)
        with pytest.raises(RewardModelError, match="answers 400"):
            function(solution_str="x" * 999, extra_info={"raw_prompt": MESSAGES})
    finally:
        server.stop()
    assert not server.healthy()
    assert not directory.exists()
    deadline = time.monotonic() + 60
    while memory and any(file.exists() for file in memory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert memory
    assert [file for file in memory if file.exists()] == []
    with pytest.raises(RewardModelError, match="does not answer"):
        function(solution_str="4", extra_info={"raw_prompt": MESSAGES})
    assert wait_until_gone(engine) == []


@pytest.mark.vllm
@pytest.mark.cells(3)
def test_an_engine_that_cannot_start_says_why(tmp_path):
    model = head.make(tmp_path / "model")
    server = RewardModelServer(spec(model, tmp_path / "engine.log", engine_kwargs={"no_such_option": 1}))
    with pytest.raises(RolloutError, match="ended with exit code 2: .*no-such-option"):
        server.start(600)


@torch.no_grad()
def written(model: Path, messages, count: int) -> str:
    """By transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for _ in range(count):
        ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], dim=1)
    return tokenizer.decode(ids[0, -count:], skip_special_tokens=True)


def asked(solution_str, reward_router_address):
    """A judge as people write them."""
    body = {"model": "judge", "messages": [{"role": "user", "content": solution_str}], "max_tokens": 5}
    connection = http.client.HTTPConnection(reward_router_address, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body | {"temperature": 0}), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["message"]["content"]


@NEEDS_SGLANG
@pytest.mark.sglang
@pytest.mark.cells(3)
def test_sglang_writes_what_transformers_writes_and_ends_when_it_is_told_to(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    of_cpu = ENGINES["sglang"].environment_on_cpu | {"PYTHONPATH": f"{STAND_INS}{os.pathsep}{PACKAGE}"}
    served = replace(spec(model, tmp_path / "engine.log", name="sglang"), scores=False)
    server = RewardModelServer(replace(served, environment=served.environment | of_cpu))
    addresses = tmp_path / "addresses.json"
    try:
        addresses.write_text(json.dumps([server.start(400)]))
        function = AskedFunction(asked, addresses, str(model))
        for text in ("4", "five, I think"):
            assert function(solution_str=text) == written(model, [{"role": "user", "content": text}], 5)
        engine = family_of(server)
        assert any("sglang" in str(child.cmdline()) for child in engine)
    finally:
        server.stop()
    assert not server.healthy()
    assert wait_until_gone(engine) == []


def test_sglang_gets_its_own_names_of_the_same_settings(tmp_path):
    own = {"vllm": {"enable_prefix_caching": True}, "sglang": {"schedule_policy": "fcfs"}, "watchdog_timeout": 9}
    served = replace(spec(tmp_path, tmp_path / "log", name="sglang", engine_kwargs=own), device="cuda", scores=False)
    arguments = " ".join(served.arguments())
    for words in (
        f"--model-path {tmp_path} --served-model-name judge --tp-size 1 --device cuda --dtype float32",
        "--context-length 256 --max-running-requests 8",
        "--mem-fraction-static 0.5",
        "--watchdog-timeout 9 --schedule-policy fcfs",
    ):
        assert words in arguments
    assert "prefix" not in arguments


def test_a_model_with_a_head_is_not_for_sglang(tmp_path):
    config = load_config(
        [
            "reward_model.enable=true",
            f"reward_model.model.path={head.make(tmp_path / 'model')}",
            "reward_model.rollout.name=sglang",
        ]
    )
    with pytest.raises(ConfigError, match=r"name=sglang: .* has a score head.* set it to vllm"):
        reward_function(config)


def test_sglang_has_memory_of_its_own():
    config = load_config(
        ["reward_model.enable=true", "reward_model.model.path=x", "reward_model.rollout.name=sglang"]
        + ["trainer.n_gpus_per_node=1"]
    )
    on_device = replace(config, trainer=replace(config.trainer, device="cuda"))
    with any_device():
        assert any("name=sglang keeps its memory" in problem for problem in problems_of(on_device, []))
    own = replace(config.reward_model, enable_resource_pool=True, nnodes=1)
    with any_device():
        found = problems_of(replace(on_device, reward_model=own), [])
    assert not any("keeps its memory" in problem for problem in found)


def test_calls_take_the_engines_in_turn(tmp_path):
    addresses = tmp_path / "addresses.json"
    addresses.write_text('["a:1", "b:2"]')
    assert {next_address(addresses) for _ in range(2)} == {"a:1", "b:2"}


def test_a_users_function_gets_the_address_if_it_takes_one(tmp_path):
    addresses = tmp_path / "addresses.json"
    addresses.write_text('["a:1"]')

    def asks(solution_str, reward_router_address):
        return f"{solution_str} {reward_router_address}"

    assert AskedFunction(asks, addresses, "tokenizer")(solution_str="4") == "4 a:1"


def test_a_function_that_cannot_ask_the_reward_model_is_refused(tmp_path):
    def alone(data_source, solution_str, ground_truth, extra_info):
        return 0.0

    with pytest.raises(ConfigError, match="does not take reward_router_address"):
        AskedFunction(alone, tmp_path, "tokenizer")


def test_a_model_without_a_head_needs_a_function_that_asks_it(tmp_path):
    config = load_config(["reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen2"])
    with pytest.raises(ConfigError, match=r"no score head.* custom_reward_function\.path"):
        reward_function(config)
    file = tmp_path / "judge.py"
    file.write_text("async def ask(data_source, solution_str, ground_truth, extra_info, reward_router_address): ...\n")
    config = load_config(
        [
            "reward_model.enable=true",
            "reward_model.model.path=builtin:tiny-qwen2",
            f"custom_reward_function.path={file}",
            "custom_reward_function.name=ask",
        ]
    )
    assert isinstance(reward_function(config), AskedFunction)


@pytest.mark.parametrize(
    ("keys", "device", "engines"),
    [
        (["trainer.n_gpus_per_node=8"], "cuda", 4),
        (["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], "cuda", 8),
        (["reward_model.enable_resource_pool=true", "reward_model.nnodes=1"], "cuda", 4),
        (["reward_model.enable_resource_pool=true", "reward_model.nnodes=3"], "cpu", 3),
        (["trainer.n_gpus_per_node=8"], "cpu", 1),
    ],
)
def test_engines_take_the_devices_of_the_trainer_or_their_own(keys, device, engines):
    served = [
        "reward_model.enable=true",
        "reward_model.model.path=x",
        "reward_model.rollout.tensor_model_parallel_size=2",
    ]
    assert num_reward_engines(load_config([*served, "data.train_batch_size=64", *keys]), device) == engines
