"""What holds of the stand-in for vLLM's server holds of the server itself. Once a day, with one worker or two."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.cells import DAY
from tests.checkpoint_engine.fakes import arenas_in
from tests.checkpoint_engine.gate import Gate, passed_on
from tests.checkpoint_engine.publisher.random_pushes import Weights, World, nothing, one_rank
from tests.checkpoint_engine.publisher.victims import Victims
from tests.checkpoint_engine.served_vllm import served_vllm
from tests.warm_workers import WarmWorkers
from tests.weight_sync.expected import expected_on_rank, same_bits
from verl.checkpoint_engine import ConfigError, WeightPublisher
from verl.checkpoint_engine.parameter_server.http_server import HttpServer
from verl.utils.builtin import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.cells(4, by="workers")]

STEPS = 25


class Served:
    """A server that may be started anew, behind a gate."""

    def __init__(self, model: Path, base: Path, warm: WarmWorkers, ranks: int, gate: Gate) -> None:
        self._model, self._base, self._warm, self._ranks, self._gate = model, base, warm, ranks, gate
        self._running, self._starts = ExitStack(), 0
        self.url = gate.url
        self._config = AutoConfig.from_pretrained(model)
        self.start()

    def start(self) -> None:
        self.close()
        self._starts += 1
        directory = self._base / str(self._starts)
        directory.mkdir()
        self.server = self._running.enter_context(served_vllm(self._model, directory, self._warm, ranks=self._ranks))
        self._gate.behind = self.server.url

    def close(self) -> None:
        self._running.close()

    before = property(lambda self: self._gate.before, lambda self, hook: setattr(self._gate, "before", hook))
    version = property(lambda self: self.server.version())

    @property
    def paused(self) -> bool:
        return bool(HttpServer(self.server.url, timeout_s=300).call("GET", "/is_paused")["is_paused"])

    def computes_with(self, weights: Weights) -> bool:
        whole = {name: tensor.float() for name, tensor in weights.items()}
        for rank in range(self._ranks):
            expected, found = expected_on_rank(whole, self._config, rank, self._ranks), self.server.weights(rank)
            if not all(same_bits(found[name], tensor) for name, tensor in expected.items()):
                return False
        return True


class OverVLLM(World):
    weights: Mapping[str, int] = World.weights | {"do_restart": 1, "do_restart_as_it_is_pushed_to": 0}
    """A start takes a while."""

    def __init__(self, chance: random.Random, served: Served, victims: Victims, shm: Path, directory: Path) -> None:
        self._config = AutoConfig.from_pretrained(directory)
        super().__init__(chance, served, victims, shm)

    def new_net(self, like: Weights | None = None) -> Any:
        return AutoModelForCausalLM.from_config(copy.deepcopy(self._config))

    def forward(self) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.randint(1, self._config.vocab_size, (2, 5))).logits
        return logits

    def spoil(self, value: float) -> None:
        self.model.module.model.norm.weight[1] = value

    def do_resize(self) -> None:
        """The server's model has a shape."""
        self.replace_sharded()
        whole = self.model.module
        larger = self.new_net()
        larger.resize_token_embeddings(self._config.vocab_size + 7)
        self.model.module = larger
        assert not self.push(self.publisher, self.model)
        self.model.module = whole

    def do_dtype(self) -> None:
        self.replace_sharded()
        self.model.to(self.chance.choice([torch.bfloat16, torch.float32]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def workers(
    request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers
) -> Iterator[Served]:
    with passed_on("") as gate:
        served = Served(directory, tmp_path_factory.mktemp("vllm"), warm, request.param, gate)
        try:
            yield served
        finally:
            served.close()


def test_a_push_is_what_the_model_holds_or_an_error_and_the_server_says_the_truth(
    workers: Served, directory: Path, shm: Path
):
    seed = int(os.environ[DAY])  # another sequence every day
    chance = random.Random(seed)
    torch.manual_seed(seed)
    with one_rank(), Victims() as victims:
        OverVLLM(chance, workers, victims, shm, directory).run(STEPS)


def test_one_server_under_two_names_is_refused_before_it_is_paused(workers: Served, directory: Path, shm: Path):
    asked: list[str] = []
    workers.before = asked.append
    other = workers.url.replace("127.0.0.1", "localhost")
    model = AutoModelForCausalLM.from_pretrained(directory)
    with (
        WeightPublisher(model, [workers.url, other]) as publisher,
        pytest.raises(ConfigError, match=f"{workers.url} and {other} are the same server: name it once"),
    ):
        publisher.push(1)
    workers.before = nothing
    assert "/pause" not in asked
    assert arenas_in(shm) == []


def test_a_server_that_is_started_anew_is_asked_again_and_gets_all_of_the_next_version(
    workers: Served, directory: Path, shm: Path
):
    asked: list[str] = []
    model = AutoModelForCausalLM.from_pretrained(directory)
    with WeightPublisher(model, [workers.url]) as publisher:
        publisher.push(1)
        workers.start()
        assert workers.version == "default"
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        workers.before = asked.append
        assert publisher.push(2).replicas_updated == (workers.url,)
        workers.before = nothing
        assert asked.index("/init_weight_transfer_engine") < asked.index("/pause")
        assert (workers.version, workers.paused) == ("2", False)
        assert workers.computes_with(dict(model.named_parameters()))


class TestStartedOtherwise:
    @pytest.mark.cells(4, by="lora")
    def test_a_server_that_serves_adapters_is_refused_before_it_is_paused(
        self, directory: Path, tmp_path: Path, warm: WarmWorkers, shm: Path
    ):
        asked: list[str] = []
        model = AutoModelForCausalLM.from_pretrained(directory)
        (tmp_path / "vllm").mkdir()
        with served_vllm(directory, tmp_path / "vllm", warm, "--enable-lora") as server, passed_on(server.url) as gate:
            before = server.greedy_tokens()
            gate.before = asked.append
            with (
                WeightPublisher(model, [gate.url]) as publisher,
                pytest.raises(ConfigError, match="takes no weights: it serves LoRA adapters.*without --enable-lora"),
            ):
                publisher.push(1)
            assert "/pause" not in asked
            assert server.greedy_tokens() == before
            assert server.version() == "default"
