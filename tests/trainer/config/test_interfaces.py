"""What users implement is held against its interface on the driver: a method or an argument that it lacks is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.checkpoint_engine.registry import CheckpointEngineRegistry
from verl.experimental.agent_loop.tool_files import load_tools
from verl.trainer.config.loader import load_config
from verl.trainer.config.validate import validate
from verl.utils.config import ConfigError
from verl.workers.engine.registry import TrainEngineRegistry
from verl.workers.rollout.registry import RolloutReplicaRegistry

TRAIN_ENGINE = """
from examples.custom_train_engine import SingleRankEngine, TrainEngineRegistry

class Old(SingleRankEngine):
    {code}

TrainEngineRegistry.register("mine")(Old)
"""
REPLICA = """
from examples.custom_rollout_engine import BigramEngine, BigramReplica, RolloutReplicaRegistry

class Engine(BigramEngine):
    {engine}

class Replica(BigramReplica):
    engine = "users_code:Engine"
    {code}

RolloutReplicaRegistry.register("mine")(Replica)
"""
BACKEND = """
from examples.custom_wire import CheckpointEngineRegistry, ProcessMemoryEngine, ProcessMemoryWire

class Wire(ProcessMemoryWire):
    {wire}

class Backend(ProcessMemoryEngine):
    def open_wire(self, topology) -> Wire:
        return Wire(1)
    {code}

CheckpointEngineRegistry.register("mine")(Backend)
"""
STRATEGY = ("actor_rollout_ref.actor.strategy=mine", "trainer.n_gpus_per_node=1")
ROLLOUT = ("actor_rollout_ref.rollout.name=mine",)
SYNC = ("checkpoint_engine.backend=mine", "checkpoint_engine.custom_backend_module=users_code")


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    for registry in (TrainEngineRegistry, RolloutReplicaRegistry, CheckpointEngineRegistry):
        registry.functions.pop("mine", None)


@pytest.mark.parametrize(
    ("module", "code", "keys", "said"),
    [
        (
            TRAIN_ENGINE,
            {"code": "def weight_source(self, rollout_dtype='bfloat16'): ..."},
            STRATEGY,
            "cannot be called as TrainEngine.weight_source(... got an unexpected keyword argument 'kept_wide'",
        ),
        (TRAIN_ENGINE, {"code": "step_lr = None"}, STRATEGY, "lacks the method TrainEngine.step_lr"),
        (
            TRAIN_ENGINE,
            {"code": "def __init__(self, *, model_config, fsdp_config, optim_config, grad_clip, device, seed): ..."},
            STRATEGY,
            "got an unexpected keyword argument 'before_step'",
        ),
        (
            REPLICA,
            {"code": "def check_config(self, strict): ...", "engine": "pass"},
            ROLLOUT,
            "cannot be called as RolloutReplica.check_config(... missing a required argument: 'strict'",
        ),
        (
            REPLICA,
            {"code": "pass", "engine": "async def sleep(self, level): ..."},
            ROLLOUT,
            "cannot be called as Engine.sleep(... missing a required argument: 'level'",
        ),
        (
            BACKEND,
            {"code": "def serve_weights(self): ...", "wire": "pass"},
            SYNC,
            "cannot be called as CheckpointEngine.serve_weights(... too many positional arguments",
        ),
        (
            BACKEND,
            {"code": "pass", "wire": "def read(self, owner, source, target): ..."},
            SYNC,
            "open_wire(): users_code.Wire.read(... cannot be called as Wire.read(... too many positional arguments",
        ),
    ],
    ids=["engine", "method", "constructor", "replica", "rollout engine", "backend", "wire"],
)
def test_a_class_of_the_user_that_does_not_fit_is_refused(
    module: str,
    code: dict[str, str],
    keys: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forgotten: None,
):
    (tmp_path / "users_code.py").write_text(module.format(**code))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_code", raising=False)
    with pytest.raises(ConfigError) as refused:
        validate(load_config([*keys, "actor_rollout_ref.model.external_lib=users_code"]))
    message = str(refused.value)
    for part in said.split("..."):
        assert part.strip() in message


def test_a_tool_whose_method_does_not_fit_is_refused(tmp_path: Path):
    (tmp_path / "tool.py").write_text(
        "from examples.custom_agent_loop.calculator import Calculator\n"
        "class Mine(Calculator):\n    async def execute(self, arguments, sample): ...\n"
    )
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: '{tmp_path}/tool.py:Mine'}}]\n")
    with pytest.raises(ConfigError, match=r"BaseTool\.execute\(.*missing a required argument: 'sample'"):
        load_tools(str(tmp_path / "tools.yaml"))
