"""While a node stages, its engines go on generating; only activation pauses them, and the report says so."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.weight_sync.conftest import CASES, Line
from tests.weight_sync.trainers import CONFIG, LocalTrainer
from verl.checkpoint_engine.backends.collective import GlooEngine
from verl.checkpoint_engine.backends.one_sided import OneSidedEngine
from verl.checkpoint_engine.links.gloo_chain import GlooChain
from verl.checkpoint_engine.registry import CheckpointEngineRegistry
from verl.workers.rollout import RolloutReplica, SamplingOptions, TokenOutput
from verl.workers.rollout.errors import NoWeights

GATE = threading.Event()
"""Until it is set no transfer is over, so that a stage of few bytes takes as long as a test likes."""
FIRST_VERSION = 10_000
"""The engines belong to other tests, too, which count from 1."""
SAMPLING = SamplingOptions(max_tokens=4, temperature=0.0, ignore_eos=True)


class HeldGloo(GlooChain):
    def broadcast(self, group: Any, memory: Any, *, sending: bool) -> Any:
        return HeldFlight(super().broadcast(group, memory, sending=sending))


@dataclass
class HeldFlight:
    flight: Any

    def is_done(self) -> bool:
        return GATE.is_set() and self.flight.is_done()


@CheckpointEngineRegistry.register("held-gloo")
class HeldGlooEngine(GlooEngine):
    communicator_class = HeldGloo


def register_held(name: str) -> None:
    """The one-sided backend `name` as `held-<name>`."""
    base: type[OneSidedEngine] = CheckpointEngineRegistry.get(name)

    class HeldEngine(base):
        def open_wire(self, topology: Any) -> Any:
            wire: Any = super().open_wire(topology)
            is_done = wire.is_done
            wire.is_done = lambda transfer: GATE.is_set() and is_done(transfer)
            return wire

    HeldEngine.__qualname__ = f"held-{name}"
    CheckpointEngineRegistry.register(f"held-{name}")(HeldEngine)


@dataclass
class Generating:
    """Short requests, one after the other, until the block ends."""

    replica: RolloutReplica
    done: list[tuple[float, float, TokenOutput]]
    """When each began and ended, and what it said."""

    async def __aenter__(self) -> Generating:
        self._task = asyncio.create_task(self._run())
        await self.until(lambda output: True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def until(self, wanted: Callable[[TokenOutput], bool]) -> None:
        while not (self.done and wanted(self.done[-1][2])):
            assert not self._task.done(), self._task.exception()
            await asyncio.sleep(0.01)

    def within(self, begin: float, end: float) -> list[TokenOutput]:
        return [output for began, ended, output in self.done if begin <= began and ended <= end]

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            name = f"background-{self.replica.name}-{time.monotonic_ns()}"
            try:
                output = await self.replica.server_handle.generate.remote([3, 4, 5], SAMPLING, name)
            except NoWeights:  # being activated; agent loops ask again, too
                await asyncio.sleep(0.01)
                continue
            self.done.append((began, time.monotonic(), output))


def versions(outputs: list[TokenOutput]) -> set[int]:
    return {span.version for output in outputs for span in output.weight_versions}


@pytest.fixture
def held_trainer(own_shm_dir: Path, model_paths: dict[str, Path]) -> Iterator[Callable[[str], LocalTrainer]]:
    made: list[LocalTrainer] = []

    def make(backend: str) -> LocalTrainer:
        if backend != "gloo" and f"held-{backend}" not in CheckpointEngineRegistry.names():
            register_held(backend)
        config = replace(CONFIG, backend=f"held-{backend}")
        made.append(LocalTrainer(model_paths["llama"], CASES["llama"].dtype, own_shm_dir / "held", config))
        made[-1].version = FIRST_VERSION
        return made[-1]

    yield make
    for trainer in made:
        asyncio.run(trainer.close())


async def stage_while_generating(trainer: LocalTrainer, replica: RolloutReplica) -> None:
    """Staging ends after that many responses."""
    responses = 10
    window: list[float] = []
    GATE.set()
    await trainer.manager.add_replicas([replica])
    await trainer.sync()
    before = trainer.version
    for moments in (trainer.node.before, trainer.node.after):
        moments["stage"] = lambda: window.append(time.monotonic())
    trainer.train()
    GATE.clear()
    try:
        async with Generating(replica, []) as generating:
            syncing = asyncio.create_task(trainer.sync())
            while len(window) != 1 or len(generating.within(window[0], math.inf)) < responses:
                assert not syncing.done(), "it has not waited"
                assert time.monotonic() < generating.done[0][0] + CONFIG.deadlines.stage_s
                await asyncio.sleep(0.01)
            GATE.set()
            report = await syncing
            await generating.until(lambda output: versions([output]) == {trainer.version})
    finally:
        GATE.set()
    begin, end = window
    during = generating.within(begin, end)
    assert len(during) >= responses
    assert versions(during) == {before}
    assert {output.stop_reason for output in during} == {"length"}
    assert sum(len(output.token_ids) for output in during) == len(during) * SAMPLING.max_tokens
    (paused_s,) = report.paused_s.values()
    assert paused_s > 0
    assert report.phase_s["stage"] + paused_s < report.total_s
    assert report.phase_s["stage"] + report.trainer_blocked_s < report.total_s


def installed(name: str) -> object:
    missing = find_spec(name) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{name} is not installed"))


@pytest.mark.parametrize("backend", ["gloo", installed("nixl"), installed("mooncake")])
async def test_tokens_are_produced_while_a_node_stages(
    hf: RolloutReplica, held_trainer: Callable[[str], LocalTrainer], backend: str
):
    await stage_while_generating(held_trainer(backend), hf)


@pytest.mark.vllm
async def test_vllm_produces_tokens_while_its_node_stages(
    llama_line: Line, held_trainer: Callable[[str], LocalTrainer]
):
    line = llama_line
    try:
        await stage_while_generating(held_trainer("gloo"), line.replica)
    finally:
        await line.trainer.manager.add_replicas([line.replica])  # and its own weights with it
