"""Random sequences of what happens to a model, its publisher and a server between pushes, and in the midst of one.

After each the server computes with what the model holds, or the push raised, and the server computes with what was
pushed as the version that it names; nothing leaves it paused. As long as one likes, over the stand-in for vLLM:

    python -m tests.checkpoint_engine.publisher.random_pushes --hours 1 --first-seed 1000
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint_engine.fakes import soon
from tests.checkpoint_engine.publisher.victims import Victims
from tests.checkpoint_engine.stand_in_vllm import StandIn, stand_in
from verl.checkpoint_engine import WeightPublisher
from verl.checkpoint_engine.errors import ActivationError, CheckpointEngineError
from verl.checkpoint_engine.parameter_server.endpoints import Endpoint
from verl.checkpoint_engine.parameter_server.writers import LEASE_S

STEPS = 25

Weights = dict[str, torch.Tensor]

OF_A_PUSH = (
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_info",
    "/reset_prefix_cache",
    "/resume",
)
"""What a publisher asks a server for, as it pushes."""


class Served(Protocol):
    """A server, as tests see it."""

    url: str
    before: Callable[[str], object]
    """Called with the path of each request that comes in; the request is refused if it raises ActivationError."""

    @property
    def version(self) -> str: ...
    @property
    def paused(self) -> bool: ...
    def start(self) -> None:
        """Anew: it knows nothing of before."""
        ...

    def computes_with(self, weights: Weights) -> bool: ...


class ServedStandIn:
    def __init__(self, vllm: StandIn, url: str) -> None:
        self.vllm, self.url, self.start = vllm, url, vllm.start

    before = property(lambda self: self.vllm.before, lambda self, hook: setattr(self.vllm, "before", hook))
    version = property(lambda self: self.vllm.version)
    paused = property(lambda self: self.vllm.paused)

    def computes_with(self, weights: Weights) -> bool:
        found = self.vllm.weights
        return found.keys() == weights.keys() and all(
            found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in weights.items()
        )


class Model(nn.Module):
    """What a publisher is given: `net` under its own names, and in another's place later."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.module = net

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)


def held(model: Model) -> Weights:
    """Tied weights once."""
    values = model.module.state_dict(keep_vars=True)
    return {
        name: whole(value)
        for name, value in {id(value): (name, value) for name, value in [*values.items()][::-1]}.values()
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class World:
    """A model, its publisher, others that come and go, and a server. Methods named `do_` are what may happen."""

    weights: Mapping[str, int] = {"do_push": 14, "do_kill": 3, "do_evaluate": 3}
    """How often each of them does; 2 of those that are not named."""

    def __init__(self, chance: random.Random, served: Served, victims: Victims, shm: Path) -> None:
        self.chance, self.served, self.victims, self.shm = chance, served, victims, shm
        self.model = Model(self.new_net())
        self.publisher = self.new_publisher()
        self.version = 0
        self.pushed: dict[str, list[Weights]] = {}
        """What was pushed under each version, in vain or not."""
        self.happened: list[str] = []

    # --- what differs with the model ---

    def new_net(self, like: Weights | None = None) -> Any:
        """Of any shape, or of that of `like`."""
        width = like["0.weight"].shape[1] if like is not None else self.chance.randint(1, 9)
        return nn.Sequential(nn.Linear(width, 3), nn.BatchNorm1d(3))

    def forward(self) -> torch.Tensor:
        linear = self.model.module[0]
        result: torch.Tensor = self.model(torch.randn(5, linear.in_features, dtype=linear.weight.dtype))
        return result

    def spoil(self, value: float) -> None:
        self.model.module[0].bias[1] = value

    # --- one sequence ---

    def run(self, steps: int) -> None:
        actions = [name for name in dir(self) if name.startswith("do_")]
        frequencies = [self.weights.get(name, 2) for name in actions]
        try:
            for _ in range(steps):
                self.happens(self.chance.choices(actions, frequencies)[0])
            self.served.before = nothing
            for _ in range(3):  # one may read what a refusal has left, and the next one say that: it is started anew
                self.happens("do_push")
            # A publisher that is closed while the machine is too busy to tell the server leaves it a claim.
            assert soon(lambda: self.push(self.publisher, self.model), 2 * LEASE_S)
            assert self.served.version == str(self.version)
            assert self.served.computes_with(held(self.model))
        except BaseException as exc:
            exc.add_note("\n".join(self.happened))
            raise
        finally:
            self.publisher.close()

    def happens(self, action: str) -> None:
        self.happened.append(action)
        getattr(self, action)()

    def new_publisher(self) -> WeightPublisher:
        return WeightPublisher(self.model, [self.served.url], config={"slots": self.chance.choice([1, 2])})

    def new_version(self, weights: Weights) -> int:
        self.version += 1
        self.pushed[str(self.version)] = [weights]
        return self.version

    def push(self, publisher: WeightPublisher, model: Model) -> bool:
        """Whether it was."""
        expected = held(model)
        version = self.new_version(expected)
        try:
            if self.chance.random() < 0.3:
                publisher.push_async(version).result()
            else:
                publisher.push(version)
        except CheckpointEngineError as exc:
            self.happened.append(f"  {version} failed: {exc}")
            if exc.message.lower().endswith("restart the server"):  # a test that asks it would read other answers, too
                self.served.start()
            self.require_true()
            return False
        assert self.served.version == str(version)
        assert not self.served.paused
        assert self.served.computes_with(expected)
        return True

    def require_true(self) -> None:
        """A server that serves computes with a version that was pushed under the name that it says."""
        if not self.served.paused and (version := self.served.version) != "default":
            assert any(self.served.computes_with(one) for one in self.pushed[version]), version

    @property
    def rescues(self) -> set[Path]:
        return {*self.shm.glob("verl-rescue-*")}

    def require_serving(self, *, after: Set[Path] = frozenset(), unless: bool = False) -> None:
        """Once the rescues of those who are gone have ended; one that was paused before, with weights that a load has
        torn, may be so."""
        assert soon(lambda: not self.rescues & after), "a rescue does not end"
        assert unless or soon(lambda: not self.served.paused), "it stays paused"
        self.require_true()

    @contextmanager
    def at(self, path: str, act: Callable[[], object]) -> Iterator[None]:
        """`act` when the server is asked for `path` the next time."""
        asked = self.chance.randint(1, 3) if path == "/collective_rpc" else 1

        def before(found: str) -> None:
            nonlocal asked
            asked -= found == path
            if found == path and not asked:
                act()

        self.served.before = before
        try:
            yield
        finally:
            self.served.before = nothing

    # --- the model ---

    def do_push(self) -> None:
        self.push(self.publisher, self.model)

    def do_train(self) -> None:
        """A step of a kind that needs the gradients, or else of one that does not."""
        if self.is_sharded:
            self.model.train()
            torch.autograd.backward(self.forward().sum())
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                        own.sub_(own_gradient(parameter).nan_to_num(0, 0, 0).clamp(-1, 1))
            self.model.zero_grad()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(self.chance.random())

    def do_assign(self) -> None:
        state = {name: tensor + 1 for name, tensor in self.model.module.state_dict().items()}
        self.model.module.load_state_dict(state, assign=True)

    def do_assign_a_parameter(self) -> None:
        if not self.is_sharded:
            module = self.chance.choice([one for one in self.model.modules() if [*one.parameters(recurse=False)]])
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(parameter.detach() * 2))

    def do_resize(self) -> None:
        self.model.module = self.new_net()

    def do_dtype(self) -> None:
        self.replace_sharded()  # FSDP2 takes no other dtype once it has run
        self.model.to(self.chance.choice([torch.bfloat16, torch.float32, torch.float64]))

    def do_evaluate(self) -> None:
        """FSDP2 leaves the root's parameters gathered."""
        if not self.is_sharded:
            fully_shard(self.model.module, mesh=init_device_mesh("cpu", (1,)))
        self.model.eval()
        with torch.no_grad():
            self.forward()
        if self.chance.random() < 0.7:
            self.do_push()

    @property
    def is_sharded(self) -> bool:
        return any(isinstance(tensor, DTensor) for tensor in self.model.state_dict().values())

    def replace_sharded(self) -> None:
        if self.is_sharded:
            state = held(self.model)
            net = self.new_net(state)
            net.load_state_dict(state, assign=True, strict=False)
            self.model.module = net

    def do_spoil(self) -> None:
        if self.is_sharded:
            return
        kept = held(self.model)
        with torch.no_grad():
            self.spoil(torch.nan)
        try:
            self.publisher.push(self.version + 1)
        except CheckpointEngineError:
            self.require_true()
        else:
            raise AssertionError("NaN was pushed")
        self.model.module.load_state_dict(kept, strict=False)

    # --- publishers ---

    def another(self) -> Model:
        self.replace_sharded()
        other = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(7)
        return other

    def do_other(self) -> None:
        """A second publisher: it is refused, unless the first has not pushed."""
        other = self.another()
        with WeightPublisher(other, [self.served.url]) as publisher:
            self.push(publisher, other)

    def do_other_at_once(self) -> None:
        """While the first pushes."""
        other = self.another()
        expected, begins = held(other), threading.Event()
        version = self.new_version(expected)
        failures: list[BaseException] = []

        def push() -> None:
            begins.wait()
            try:
                with WeightPublisher(other, [self.served.url]) as publisher, suppress(CheckpointEngineError):
                    publisher.push(version)
            except BaseException as exc:  # noqa: BLE001 - raised below
                failures.append(exc)

        thread = threading.Thread(target=push)
        thread.start()
        with self.at(self.chance.choice(OF_A_PUSH), begins.set):
            self.do_push()
            begins.set()
            thread.join()
        assert not failures, failures
        self.require_true()

    def do_close(self) -> None:
        self.publisher.close()
        self.publisher = self.new_publisher()

    def do_close_as_it_pushes(self) -> None:
        expected, seen, was_paused = held(self.model), threading.Event(), self.served.paused
        version = self.new_version(expected)
        with self.at(self.chance.choice(OF_A_PUSH), seen.set):
            pending = None
            with suppress(CheckpointEngineError):
                pending = self.publisher.push_async(version)
            while pending is not None and not pending.done() and not seen.wait(0.01):
                pass
            self.publisher.close()
        gone = self.rescues
        self.publisher = self.new_publisher()
        self.require_serving(after=gone, unless=was_paused)

    def do_cancel(self) -> None:
        """Ctrl-C while the server is asked for something."""
        expected, sent, was_paused = held(self.model), threading.Event(), self.served.paused
        version = self.new_version(expected)

        def interrupt() -> None:
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)

        with self.at(self.chance.choice(OF_A_PUSH), interrupt):
            try:
                with suppress(CheckpointEngineError):
                    self.publisher.push(version)
                if sent.is_set():
                    time.sleep(10)  # it is on its way
            except KeyboardInterrupt:
                pass
        self.require_serving(unless=was_paused)

    def do_kill(self) -> None:
        """A signal ends a publisher's process while it asks for something in its last push, or after that."""
        self.publisher.close()
        weights, was_paused = [held(self.model), held(self.another())][: self.chance.randint(1, 2)], self.served.paused
        pushes = {self.new_version(one): one for one in weights}
        path, num_served = self.chance.choice([*OF_A_PUSH, ""]), 0
        by = self.chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        victim = self.victims.new(self.shm, self.served.url, pushes)

        def before(found: str) -> None:
            nonlocal num_served
            if found == path and num_served == len(pushes) - 1:
                victim.kill(by)
            num_served += found == "/resume"

        self.served.before = before
        victim.go()
        victim.wait()
        self.served.before, gone = nothing, self.rescues
        self.publisher = self.new_publisher()
        if self.chance.random() < 0.5:
            self.do_push()  # what outlives the victim may be at work
        self.require_serving(after=gone, unless=was_paused)

    # --- the server ---

    def do_restart(self) -> None:
        self.served.start()

    def do_restart_as_it_is_pushed_to(self) -> None:
        with self.at(self.chance.choice(OF_A_PUSH), self.served.start):
            self.do_push()
        self.do_push()  # where an update went on, answers lag

    def do_leave_an_update(self) -> None:
        """As a publisher that is killed."""
        with suppress(CheckpointEngineError):
            Endpoint(self.served.url, timeout_s=60).call("POST", "/start_weight_update", {})

    def do_fail(self) -> None:
        """The next request of one kind is refused, once."""

        def fail() -> None:
            raise ActivationError("told to fail")

        with self.at(self.chance.choice(OF_A_PUSH), fail):
            self.do_push()


def own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def nothing(_: str) -> None: ...


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for FSDP2."""
    dist.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_with_stand_in(seed: int, victims: Victims, shm: Path, steps: int = STEPS) -> World:
    """`shm`: the directory that VERL_SHM_DIR names, of this sequence alone."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    with stand_in(chance.choice([1, 2])) as (vllm, url):
        world = OverStandIn(chance, ServedStandIn(vllm, url), victims, shm)
        try:
            world.run(steps)
        except BaseException as exc:
            exc.add_note(f"seed {seed}, {vllm.ranks} ranks")
            exc.add_note(f"version {vllm.version}, paused: {vllm.paused}, asked last: {' '.join(vllm.log[-40:])}")
            raise
    return world


class OverStandIn(World):
    served: ServedStandIn

    def do_ignore(self) -> None:
        """An update gets 200 and changes nothing."""
        self.served.vllm.sleeps_through = True
        self.do_push()
        self.served.vllm.sleeps_through = False


def main() -> int:
    """How many sequences were not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--verbose", action="store_true", help="with what is logged")
    options = parser.parse_args()
    if not options.verbose:
        logging.disable(logging.CRITICAL)
    happened: Counter[str] = Counter()
    failed: list[int] = []
    seed, began_s = options.first_seed, time.monotonic()
    with one_rank(), Victims() as victims:
        while time.monotonic() - began_s < options.hours * 3600:
            with tempfile.TemporaryDirectory() as shm:
                os.environ["VERL_SHM_DIR"] = shm
                try:
                    world = run_with_stand_in(seed, victims, Path(shm), options.steps)
                    happened.update(action for action in world.happened if action.startswith("do_"))
                except Exception:  # noqa: BLE001 - the next seeds are tried, too
                    failed.append(seed)
                    traceback.print_exc()
            seed += 1
            if seed % 20 == 0:
                print(
                    f"{time.monotonic() - began_s:.0f} s: seeds {options.first_seed} to {seed - 1}, failed: {failed}, "
                    f"{dict(happened)}",
                    flush=True,
                )
    print(f"seeds {options.first_seed} to {seed - 1}: failed {failed}; {dict(happened)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
