"""A reward model behind HTTP: what it says, who gets its address, and how it ends."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from tests.workers.reward_model import head
from verl.checkpoint_engine.engines.leftovers import shared_memory_of
from verl.trainer.config.loader import load_config
from verl.trainer.fleet.reward_models import num_engines, reward_function
from verl.utils.config import ConfigError
from verl.utils.reward_score.served import AskedFunction, RewardModelError, ScoredByModel, next_address
from verl.workers.config.reward_model import RewardRolloutConfig
from verl.workers.reward_model import RewardModelServer, ServerSpec
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


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_an_engine_gives_the_scores_of_transformers_and_ends_when_it_is_told_to(tmp_path):
    model = head.make(tmp_path / "model")
    server = RewardModelServer(spec(model, tmp_path / "engine.log"))
    addresses = tmp_path / "addresses.json"
    try:
        addresses.write_text(json.dumps([server.start(300)]))
        function = ScoredByModel(addresses, 30.0)
        for answer in ("4", "five, I think"):
            given = function(
                data_source="x", solution_str=answer, ground_truth="4", extra_info={"raw_prompt": MESSAGES}
            )
            expected = head.score(model, [*MESSAGES, {"role": "assistant", "content": answer}])
            assert given == pytest.approx(expected, abs=1e-4)
        memory = shared_memory_of(os.getpid())
        with pytest.raises(RewardModelError, match="answers 400"):
            function(solution_str="x" * 999, extra_info={"raw_prompt": MESSAGES})
    finally:
        server.stop()
    assert not server.healthy()
    deadline = time.monotonic() + 10
    while memory and any(file.exists() for file in memory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert memory
    assert [file for file in memory if file.exists()] == []
    with pytest.raises(RewardModelError, match="does not answer"):
        function(solution_str="4", extra_info={"raw_prompt": MESSAGES})
    assert [child.cmdline() for child in psutil.Process().children() if "vllm" in str(child.cmdline())] == []


@pytest.mark.vllm
@pytest.mark.timeout(200)
def test_an_engine_that_cannot_start_says_why(tmp_path):
    model = head.make(tmp_path / "model")
    server = RewardModelServer(spec(model, tmp_path / "engine.log", engine_kwargs={"no_such_option": 1}))
    with pytest.raises(RolloutError, match="ended with exit code 2: .*no-such-option"):
        server.start(150)


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
    with pytest.raises(ConfigError, match=r"no head .* custom_reward_function\.path"):
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
    assert num_engines(load_config([*served, "data.train_batch_size=64", *keys]), device) == engines
