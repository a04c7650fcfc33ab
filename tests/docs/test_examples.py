"""The examples of the guides work: every one is imported and run, in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoint_engine.fakes import Fleet, RecordingReplica, RowShardedSource, arenas_in
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import SyncAborted
from verl.checkpoint_engine.support.registry import require_methods
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank
from verl.experimental.agent_loop.agent_program import close_programs
from verl.experimental.agent_loop.registry import constructor_arguments, known_loops, loop_factory
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.trainer.config.validate import validate
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.utils.builtin import make_tiny_model
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.utils.reward_score import load_reward_function
from verl.workers.config import AlgorithmConfig, HFModelConfig, OptimizerConfig, PPOConfig, RolloutConfig
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.registry import TrainEngineRegistry, check_engine
from verl.workers.rollout.engine import Engine, EngineSpec
from verl.workers.rollout.errors import NoWeights
from verl.workers.rollout.records import SamplingOptions, TokenOutput, WeightVersionSpan
from verl.workers.rollout.registry import RolloutReplicaRegistry
from verl.workers.rollout.server import RolloutServer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def configured(*overrides: str) -> PPOConfig:
    """What the command line of the guide gives, checked as a run would check it."""
    config = load_config(overrides)
    validate(config)
    return config


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("examples") / "model", tie_word_embeddings=True)


# ---- custom_reward.py


@pytest.mark.parametrize(("response", "score"), [("42", 1.0), (" 42\n", 1.0), ("so it is 42.", 0.2), ("41", 0.0)])
def test_the_reward_function_gives_full_partial_and_no_credit(response: str, score: float):
    config = configured(
        f"custom_reward_function.path={EXAMPLES / 'custom_reward.py'}",
        "+custom_reward_function.reward_kwargs.partial_credit=0.2",
    )
    compute_score = load_reward_function(config.custom_reward_function)
    result = compute_score(data_source="any", solution_str=response, ground_truth="42", extra_info={})
    assert result["score"] == score


# ---- custom_advantage.py


def test_the_advantage_estimator_is_found_by_name_and_subtracts_the_mean_of_the_batch():
    config = configured(
        "actor_rollout_ref.model.external_lib=examples.custom_advantage", "algorithm.adv_estimator=batch_mean"
    )
    estimate = get_adv_estimator_fn(config.algorithm.adv_estimator)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [5.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    advantages, _ = estimate(rewards, mask, np.array(["a", "b", "c"], dtype=object), AlgorithmConfig())
    assert torch.equal(advantages, torch.tensor([[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]))


# ---- custom_backend.py


TCP: dict[str, Any] = {
    "backend": "tcp_example",
    "custom_backend_module": "examples.custom_backend",
    "block_kilobytes": 4,
}


async def test_the_backend_brings_every_version_bit_equal_to_every_node(tmp_path: Path):
    tensors = {"w": torch.randn(65, 33), "wide": torch.randn(3, 5000), "none": torch.zeros(0), "s": torch.randn(())}
    async with Fleet(tensors, tmp_path, trainers=2, nodes=2, replicas=2, **TCP) as fleet:
        for version in range(3):
            expected = {name: tensor + version for name, tensor in tensors.items()}
            fleet.set_weights(expected)
            report = await fleet.manager.update_weights(version)
            # Once into the private copies, and once into each node's slot.
            assert report.nbytes_moved == report.nbytes_needed * 3 // 2
            for replica in fleet.replicas:
                for name, tensor in expected.items():
                    assert torch.equal(replica.weights[name], tensor)


async def test_the_backend_moves_pieces_that_are_not_contiguous(tmp_path: Path):
    class ColumnSource(RowShardedSource):
        """Half of the columns on every rank."""

        def shards(self):
            from verl.checkpoint_engine.plan.types import Box, Shard

            half = slice(0, 20) if self._rank == 0 else slice(20, 40)
            return [Shard("w", Box((0, half.start), (30, half.stop)))]

    weight = torch.randn(30, 40)
    config = CheckpointEngineConfig.from_mapping(TCP)
    ranks = [TrainerRank(rank, ColumnSource({"w": weight}, rank, 2), config) for rank in range(2)]
    node = RolloutNode(0, config, job="columns", shm_dir=tmp_path)
    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=[node])
    replica = RecordingReplica()
    await manager.add_replicas([replica])
    await manager.update_weights(1)
    assert torch.equal(replica.weights["w"], weight)
    await manager.close()


async def test_a_sender_of_the_backend_that_is_gone_aborts_the_sync_and_is_named(tmp_path: Path):
    async with Fleet({"w": torch.randn(8, 8)}, tmp_path, trainers=2, retries=0, **TCP) as fleet:
        await fleet.manager.update_weights(1)
        fleet.trainers[1].after["publish"] = lambda: fleet.trainers[1].member._engine.finalize()
        with pytest.raises(SyncAborted, match="reading version 2 from trainer-1 at 127.0.0.1"):
            await fleet.manager.update_weights(2)
        assert fleet.replicas[0].version == 1


# ---- custom_rollout_engine.py


LONG = 5_000
"""Tokens of a response that is still in flight when the test gets to it."""


@pytest.fixture
async def bigram_server(model_path: Path) -> RolloutServer:
    configured(
        "actor_rollout_ref.model.external_lib=examples.custom_rollout_engine", "actor_rollout_ref.rollout.name=bigram"
    )
    replica = RolloutReplicaRegistry.get("bigram")(
        replica_rank=0,
        config=RolloutConfig(name="bigram", max_model_len=2 * LONG),
        model=HFModelConfig(path=str(model_path)),
    )
    spec = EngineSpec(
        name=replica.name,
        engine=replica.engine,
        config=replica.config,
        model=replica.model,
        device="cpu",
        max_model_len=2 * LONG,
        seed=0,
    )
    server = RolloutServer(spec)
    await server.start()
    return server


async def committed(model_path: Path, shm_dir: Path, versions: int) -> tuple[CheckpointEngineManager, str]:
    """A manager that has brought `versions` versions of the model to the arena of a node."""
    config = CheckpointEngineConfig()
    weights = dict(AutoModelForCausalLM.from_pretrained(model_path).named_parameters())
    source = RowShardedSource({name: tensor.detach() for name, tensor in weights.items()}, 0, 1)
    node = RolloutNode(0, config, job="bigram", shm_dir=shm_dir)
    manager = CheckpointEngineManager(config=config, trainers=[TrainerRank(0, source, config)], nodes=[node])
    for version in range(1, versions + 1):
        await manager.update_weights(version)
    return manager, str(arenas_in(shm_dir)[0])


async def tokens_so_far(server: RolloutServer, requests: int) -> list[int]:
    """Of the requests in flight, once so many of them have some."""
    engine: Any = server._engine
    for _ in range(10_000):
        found = [len(request.tokens) for request in engine._requests]
        if len(found) == requests and all(found):
            break
        await asyncio.sleep(0.001)
    return found


async def test_the_rollout_engine_generates_from_the_version_that_was_activated(
    bigram_server: RolloutServer, model_path: Path, tmp_path: Path
):
    sampling = SamplingOptions(max_tokens=5, ignore_eos=True)
    with pytest.raises(NoWeights):
        await bigram_server.generate([1, 2], sampling, "a")
    manager, arena = await committed(model_path, tmp_path, versions=3)
    await bigram_server.pause("abort")
    await bigram_server.activate(arena, 3)
    await bigram_server.resume()
    output = await bigram_server.generate([1, 2], sampling, "b")
    assert len(output.token_ids) == len(output.log_probs or []) == 5
    assert output.stop_reason == "length"
    assert output.weight_versions == (WeightVersionSpan(0, 5, 3),)
    await manager.close()


@pytest.mark.parametrize(("mode", "reason"), [("abort", "aborted"), ("wait", "length")])
async def test_the_rollout_engine_ends_requests_in_flight_as_the_pause_mode_says(
    bigram_server: RolloutServer, model_path: Path, tmp_path: Path, mode: str, reason: str
):
    manager, arena = await committed(model_path, tmp_path, versions=1)
    await bigram_server.activate(arena, 1)
    sampling = SamplingOptions(max_tokens=LONG, ignore_eos=True)
    requests = [asyncio.create_task(bigram_server.generate([1], sampling, str(index))) for index in range(4)]
    await tokens_so_far(bigram_server, 4)
    await bigram_server.pause(mode)
    queued = asyncio.create_task(bigram_server.generate([1], SamplingOptions(max_tokens=3), "queued"))
    for output in await asyncio.gather(*requests):
        assert output.stop_reason == reason
        assert (len(output.token_ids) == LONG) == (mode == "wait")
    assert not queued.done()
    await bigram_server.resume()
    assert (await queued).stop_reason in ("completed", "length")
    await manager.close()


async def test_requests_that_the_rollout_engine_kept_go_on_with_the_new_version(
    bigram_server: RolloutServer, model_path: Path, tmp_path: Path
):
    manager, arena = await committed(model_path, tmp_path, versions=1)
    await bigram_server.activate(arena, 1)
    sampling = SamplingOptions(max_tokens=LONG, ignore_eos=True)
    request = asyncio.create_task(bigram_server.generate([1], sampling, "kept"))
    await tokens_so_far(bigram_server, 1)
    await bigram_server.pause("keep")
    (kept,) = await tokens_so_far(bigram_server, 1)
    assert 0 < kept < LONG
    await manager.update_weights(2)
    await bigram_server.activate(arena, 2)
    await bigram_server.resume()
    output = await request
    assert output.weight_versions == (WeightVersionSpan(0, kept, 1), WeightVersionSpan(kept, LONG, 2))
    await manager.close()


def test_the_rollout_engine_has_the_methods_of_its_protocol():
    from examples.custom_rollout_engine import BigramEngine

    require_methods(BigramEngine, Engine, "bigram")


# ---- custom_train_engine.py


def training_batch() -> DataProto:
    ids = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :5],
            "responses": ids[:, 5:],
            "response_mask": mask[:, 5:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": mask.cumsum(-1) - 1,
        }
    )


def likelihood(log_prob: torch.Tensor, entropy: Any, micro_batch: DataProto, totals: Any) -> Any:
    loss = -log_prob.sum() / totals.num_tokens
    return loss, {"actor/pg_loss": loss.detach()}


@pytest.fixture
def train_engine(model_path: Path) -> Any:
    from examples.custom_train_engine import SingleRankEngine

    engine = SingleRankEngine(
        model_config=HFModelConfig(path=str(model_path)), optim_config=OptimizerConfig(lr=1e-2, weight_decay=0.0)
    )
    engine.build()
    return engine


def test_the_training_engine_computes_log_probs_and_learns_in_any_micro_batches(train_engine: Any):
    data = training_batch()
    limits = MicroBatchLimits(max_sequences=3)
    before, _ = train_engine.compute_log_prob(data, temperature=1.0, limits=limits)
    logits = train_engine.model(data.batch["input_ids"]).logits[:, 4:-1]
    expected = logits.log_softmax(-1).gather(-1, data.batch["responses"][..., None])[..., 0]
    torch.testing.assert_close(before, expected.detach(), rtol=1e-4, atol=1e-4)
    metrics = train_engine.train_mini_batch(data, likelihood, temperature=1.0, limits=limits)
    assert metrics["loss"] == pytest.approx(-float(before.mean()), rel=1e-4)
    after, entropies = train_engine.compute_log_prob(data, temperature=1.0, limits=limits, calculate_entropy=True)
    assert after.mean() > before.mean()
    assert entropies is not None and (entropies > 0).all()


def test_the_training_engine_is_found_by_name(train_engine: Any):
    config = configured(
        "actor_rollout_ref.model.external_lib=examples.custom_train_engine",
        "actor_rollout_ref.actor.strategy=single_rank",
        "trainer.n_gpus_per_node=1",
    )
    assert TrainEngineRegistry.get(config.actor_rollout_ref.actor.strategy) is type(train_engine)
    with pytest.raises(ConfigError, match="strategy='fsdp' is already registered by"):
        TrainEngineRegistry.register("fsdp")(type(train_engine))


def test_a_training_engine_without_an_argument_of_the_protocol_is_refused_on_the_driver(
    train_engine: Any, monkeypatch: pytest.MonkeyPatch
):
    options: dict[str, Any] = {"fsdp": None, "megatron": None, "model": None, "world_size": 1, "device": "cpu"}
    check_engine("single_rank", **options)
    with pytest.raises(ConfigError, match=r"strategy=single_rank: .*SingleRankEngine has no method compute_values"):
        check_engine("single_rank", labels=1, **options)
    monkeypatch.setattr(type(train_engine), "weight_source", lambda self, rollout_dtype: None)
    with pytest.raises(ConfigError, match=r"weight_source\(self, rollout_dtype\): .*'kept_wide'"):
        check_engine("single_rank", **options)


def test_the_training_engine_goes_on_from_its_checkpoint(train_engine: Any, tmp_path: Path):
    data, limits = training_batch(), MicroBatchLimits(max_tokens=1000)
    contents = ["model", "optimizer", "extra", "hf_model"]
    train_engine.train_mini_batch(data, likelihood, temperature=1.0, limits=limits)
    train_engine.step_lr()
    train_engine.save_checkpoint(tmp_path, contents)
    expected = train_engine.train_mini_batch(data, likelihood, temperature=1.0, limits=limits)
    train_engine.build()
    train_engine.load_checkpoint(tmp_path, contents)
    assert train_engine.train_mini_batch(data, likelihood, temperature=1.0, limits=limits) == expected
    assert (tmp_path / "huggingface" / "model.safetensors").is_file()


def test_the_training_engine_sends_what_engines_keep_wide_in_float32(train_engine: Any):
    name = next(iter(dict(train_engine.model.named_parameters())))
    dtypes = {spec.name: spec.dtype for spec in train_engine.weight_source("bfloat16", kept_wide={name}).specs()}
    assert [wide for wide, dtype in dtypes.items() if dtype == "float32"] == [name]


async def test_the_weights_of_the_training_engine_arrive_cast_to_the_rollout_dtype(train_engine: Any, tmp_path: Path):
    config = CheckpointEngineConfig(block_kilobytes=4)
    node = RolloutNode(0, config, job="whole", shm_dir=tmp_path)
    manager = CheckpointEngineManager(
        config=config, trainers=[TrainerRank(0, train_engine.weight_source(), config)], nodes=[node]
    )
    replica = RecordingReplica()
    await manager.add_replicas([replica])
    await manager.update_weights(1)
    weights = dict(train_engine.model.named_parameters())
    assert replica.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(replica.weights[name], weight.detach().bfloat16())
    await manager.close()


# ---- custom_agent_loop/


class ScriptedServers:
    """Stands for `ServerManager`: says one text per call and ends the message."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self._tokenizer, self._texts = tokenizer, list(texts)
        self.prompts: list[str] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any) -> TokenOutput:
        self.prompts.append(self._tokenizer.decode(prompt_ids))
        tokens = [*self._tokenizer.encode(self._texts.pop(0), add_special_tokens=False), self._tokenizer.eos_token_id]
        spans = (WeightVersionSpan(0, len(tokens), 1),)
        return TokenOutput(tokens, [-0.5] * len(tokens), "completed", spans)


async def run_loop(name: str, config: PPOConfig, *texts: str) -> tuple[Any, ScriptedServers, Any]:
    tokenizer = build_tokenizer()
    servers = ScriptedServers(tokenizer, *texts)
    loops = known_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    loop = loop_factory(name, loops)(**constructor_arguments(config, servers, tokenizer))
    sampling = SamplingOptions(max_tokens=config.data.max_response_length)
    output = await loop.run(sampling.as_dict(), raw_prompt=[{"role": "user", "content": "6*7="}])
    return output, servers, tokenizer


async def test_the_agent_loop_asks_again_and_trains_only_on_what_the_policy_said():
    config = configured(
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={EXAMPLES}/custom_agent_loop/agent_loops.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=self_check_agent",
        "data.max_response_length=128",
    )
    output, servers, tokenizer = await run_loop("self_check_agent", config, "41", "42")
    question = "<|user|>Check your answer and give it again.<|end|><|assistant|>"
    assert tokenizer.decode(output.response_ids) == f"41<|end|>{question}42<|end|>"
    trained = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "41<|end|>42<|end|>"
    assert servers.prompts[1] == f"<|user|>6*7=<|end|><|assistant|>41<|end|>{question}"
    assert output.num_turns == 4


async def test_the_tool_answers_the_calls_of_the_tool_agent():
    config = configured(
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={EXAMPLES}/custom_agent_loop/tools.yaml",
        "data.max_prompt_length=512",
        "data.max_response_length=256",
    )
    call = '<tool_call>{"name": "calculate", "arguments": {"left": 6, "operation": "*", "right": 7}}</tool_call>'
    output, servers, _ = await run_loop("tool_agent", config, call, "42")
    assert servers.prompts[1].endswith("<|tool|>42<|end|><|assistant|>")
    assert '"name": "calculate"' in servers.prompts[0]
    assert output.metrics["tool_calls"] == 1


# ---- any_agent/


@pytest.mark.parametrize(
    ("name", "said", "turns"), [("function", ["41", "42"], 4), ("program", ["42"], 2), ("server", ["42"], 2)]
)
async def test_an_agent_of_the_openai_client_is_trained_on_what_the_policy_said(
    name: str, said: list[str], turns: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)  # as the guide does
    config = configured(
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/any_agent/agents.yaml",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={name}",
        "data.max_response_length=128",
    )
    output, _, tokenizer = await run_loop(name, config, *said)
    trained = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "".join(f"{text}<|end|>" for text in said)
    assert output.num_turns == turns
    told = {"program": {"agent_output": "42\n"}, "server": {"agent_output": "42"}}
    assert output.extra_fields == told.get(name, {})
    await close_programs()
