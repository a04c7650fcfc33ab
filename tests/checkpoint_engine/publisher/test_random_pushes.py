"""Whatever happens to model, publisher and server between pushes: after each push the server computes with what the
model holds, or the push raised, and the server names the version that it computes with."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint_engine.stand_in_vllm import StandIn, stand_in
from verl.checkpoint_engine import WeightPublisher
from verl.checkpoint_engine.errors import ActivationError, CheckpointEngineError

STEPS = 25

Weights = dict[str, torch.Tensor]


def held(model: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class World:
    """A model, its publisher, one that comes and goes, and a server. Methods named `do_` are what may happen."""

    def __init__(self, chance: random.Random, vllm: StandIn, url: str) -> None:
        self.chance, self.vllm, self.url = chance, vllm, url
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.publisher = WeightPublisher(self.model, [url], config={"slots": chance.choice([1, 2])})
        self.version = 0
        self.pushed: dict[str, list[Weights]] = {}
        """What was pushed under each version since the server was started, in vain or not."""

    def push(self, publisher: WeightPublisher, model: nn.Module) -> None:
        self.version += 1
        expected = held(model)
        self.pushed.setdefault(str(self.version), []).append(expected)
        try:
            if self.chance.random() < 0.3:
                publisher.push_async(self.version).result()
            else:
                publisher.push(self.version)
        except CheckpointEngineError:
            self.require_true()
            return
        assert self.vllm.version == str(self.version)
        assert not self.vllm.paused
        require_same(self.vllm.weights, expected)

    def require_true(self) -> None:
        """A server that serves computes with a version that was pushed under the name that it says."""
        if not self.vllm.paused and self.vllm.version in self.pushed:
            require_same(self.vllm.weights, *self.pushed[self.vllm.version])

    def do_push(self) -> None:
        self.push(self.publisher, self.model)

    def do_train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape))

    def do_assign(self) -> None:
        self.model.load_state_dict({name: tensor + 1 for name, tensor in held(self.model).items()}, assign=True)

    def do_resize(self) -> None:
        self.model[0] = nn.Linear(self.chance.randint(1, 9), 3)

    def do_dtype(self) -> None:
        self.model.to(self.chance.choice([torch.bfloat16, torch.float32, torch.float64]))

    def do_spoil(self) -> None:
        with torch.no_grad():
            self.model[0].bias[1] = torch.nan
        with pytest.raises(CheckpointEngineError, match=r"0\.bias has NaN|stays in service|no replica"):
            self.publisher.push(self.version + 1)
        self.require_true()
        with torch.no_grad():
            self.model[0].bias[1] = 0.0

    def do_other(self) -> None:
        """A second publisher: it is refused, unless the first has not pushed."""
        other = copy.deepcopy(self.model)
        with torch.no_grad():
            other[0].bias.add_(7)
        with WeightPublisher(other, [self.url]) as publisher:
            self.push(publisher, other)

    def do_close(self) -> None:
        self.publisher.close()
        self.publisher = WeightPublisher(self.model, [self.url])

    def do_restart(self) -> None:
        self.vllm.start()
        self.pushed.clear()

    def do_leave_an_update(self) -> None:
        """As a publisher that is killed."""
        if not any(worker.active for worker in self.vllm.workers):
            self.vllm.rpc("start")

    def do_fail(self) -> None:
        """The next request of one kind is refused, once."""
        step = self.chance.choice(["/pause", "/update_weights", "/finish_weight_update", "/resume", "/weight_info"])

        def fail(path: str) -> None:
            if path == step:
                self.vllm.before = lambda path: None
                raise ActivationError("told to fail")

        self.vllm.before = fail

    def do_ignore(self) -> None:
        self.vllm.sleeps_through = True
        self.do_push()
        self.vllm.sleeps_through = False


def require_same(found: Weights, *any_of: Weights) -> None:
    assert any(
        found.keys() == one.keys()
        and all(found[name].dtype == one[name].dtype and torch.equal(found[name], one[name]) for name in one)
        for one in any_of
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_push_is_what_the_model_holds_or_an_error_and_the_server_says_the_truth(seed: int, shm: Path):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    with stand_in(chance.choice([1, 2])) as (vllm, url):
        world = World(chance, vllm, url)
        actions: list[Any] = [name for name in dir(World) if name.startswith("do_")]
        weights = [12 if name == "do_push" else 2 for name in actions]
        try:
            for _ in range(STEPS):
                getattr(world, chance.choices(actions, weights)[0])()
            vllm.before = lambda path: None
            world.do_push()
            world.do_push()
        finally:
            world.publisher.close()
        assert vllm.version == str(world.version)
        require_same(vllm.weights, held(world.model))
