"""Backends written for verl: their methods are called as verl calls them, and what they bring is verified as always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_engine import queue_backend
from tests.checkpoint_engine.fakes import ColumnShardedSource, Fleet, RowShardedSource
from tests.checkpoint_engine.test_chain import every_kind
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError, IntegrityError, SyncAborted, TransportError
from verl.checkpoint_engine.registry import resolve_backend


def fleet_of(tensors: dict[str, torch.Tensor], tmp_path: Path, *, nodes: int = 1, **options: Any) -> Fleet:
    kwargs = {"topic": f"w:{nodes}", **options.pop("kwargs", {})}
    return Fleet(
        tensors,
        tmp_path,
        backend="verl-queue",
        nodes=nodes,
        replicas=nodes,
        retries=0,
        block_kilobytes=4,
        engine_kwargs={"verl-queue": kwargs},
        deadlines={"stage_s": 30.0},
        **options,
    )


@pytest.mark.parametrize(
    ("trainers", "nodes", "source"), [(1, 1, RowShardedSource), (2, 2, ColumnShardedSource), (3, 1, RowShardedSource)]
)
async def test_three_versions_of_every_kind_of_tensor_arrive_bit_equal_on_every_node(
    trainers: int, nodes: int, source: type[RowShardedSource], tmp_path: Path
):
    options = {"trainers": trainers, "nodes": nodes, "source": source, "update_weights_bucket_megabytes": 1}
    async with fleet_of(every_kind(0), tmp_path, **options) as fleet:
        assert len([version async for version in fleet.three_versions(every_kind)]) == 3


async def test_methods_are_called_in_verl_s_order_for_every_version(tmp_path: Path):
    queue_backend.LOG.clear()
    async with fleet_of({"w": torch.randn(8, 8)}, tmp_path, trainers=2) as fleet:
        for version in range(2):
            await fleet.manager.update_weights(version)
    of_version = [
        "prepare",
        "prepare",
        "prepare",
        "build_topology 2 1",
        "init_process_group -1",
        "init_process_group 0",
        "init_process_group 1",
    ]
    methods = [method for _, method in queue_backend.LOG if method != "finalize"]
    assert methods[:4] == of_version[:4]
    assert sorted(methods[4:7]) == of_version[4:]
    assert sorted(methods[7:10]) == ["receive_weights", "send_weights", "send_weights"]
    assert methods[10:14] == of_version[:4]
    assert [method for _, method in queue_backend.LOG].count("finalize") == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("name", "it sent 'another', which is no tensor of the model"),
        ("shape", r"it sent 'w' as float32\[64\], not float32\[8, 8\]"),
        ("raises", "QueueEngine.send_weights: ValueError: out of tokens"),
        ("few", r"receive_weights ended without 1 tensors: z"),
        ("bit", "are not what the trainer sent"),
    ],
)
async def test_what_a_backend_does_wrong_aborts_the_sync_and_is_said(
    wrong: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if wrong == "raises":  # the node goes on waiting in a call that nobody can end
        monkeypatch.setattr(queue_backend, "TIMEOUT_MS", 3000)
    tensors = {"w": torch.randn(8, 8), "z": torch.randn(8, 8)}
    async with fleet_of(tensors, tmp_path, kwargs={"wrong": wrong}) as fleet:
        with pytest.raises(SyncAborted, match=message) as raised:
            await fleet.manager.update_weights(1)
        cause = raised.value.__cause__
        assert isinstance(cause, IntegrityError if wrong == "bit" else TransportError)
        assert (cause.version, cause.member) == (1, "trainer-0" if wrong == "raises" else "node-0")


async def test_a_backend_that_does_not_end_is_given_up_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queue_backend, "TIMEOUT_MS", 2000)
    async with fleet_of({"w": torch.randn(8, 8)}, tmp_path, kwargs={"wrong": "end"}) as fleet:
        with pytest.raises(SyncAborted, match=r"receive_weights: Again") as raised:
            await fleet.manager.update_weights(1)
        assert raised.value.member == "node-0"


def test_a_class_that_lacks_methods_is_refused_by_their_names():
    @CheckpointEngineRegistry.register("verl-unfinished")
    class Unfinished(CheckpointEngine):
        def prepare(self):
            return {}

        async def send_weights(self, weights):
            pass

    config = CheckpointEngineConfig.from_mapping({"backend": "verl-unfinished"})
    with pytest.raises(ConfigError, match="lacks build_topology, init_process_group, receive_weights, finalize"):
        resolve_backend(config)


@pytest.mark.parametrize(
    ("method", "own", "said"),
    [
        ("send_weights", lambda self: None, r"send_weights\(self\): too many"),
        ("build_topology", lambda self, ranks, nodes, metadata: None, "build_topology.*'metadata'"),
        ("receive_weights", lambda self, step: None, "receive_weights.*'step'"),
    ],
)
def test_a_method_with_other_arguments_than_verl_s_is_refused_with_them(method, own, said):
    changed = type(f"Changed_{method}", (queue_backend.QueueEngine,), {method: own})
    CheckpointEngineRegistry.register(f"verl-{method}")(changed)
    with pytest.raises(ConfigError, match=f"^checkpoint_engine.backend=verl-{method}: .*{said}"):
        resolve_backend(CheckpointEngineConfig.from_mapping({"backend": f"verl-{method}"}))


@pytest.mark.parametrize("options", [{"topics": "w"}, {"bucket": 1}])
def test_options_that_the_class_does_not_take_are_refused_on_the_driver(options: dict[str, Any]):
    config = CheckpointEngineConfig.from_mapping({"backend": "verl-queue", "engine_kwargs": {"verl-queue": options}})
    with pytest.raises(ConfigError, match=r"engine_kwargs.verl-queue: QueueEngine\(.* cannot take"):
        resolve_backend(config)


def test_a_module_that_cannot_be_imported_is_one_line():
    config = CheckpointEngineConfig.from_mapping({"backend": "mine", "custom_backend_module": "no.such.module"})
    with pytest.raises(ConfigError, match=r"custom_backend_module='no.such.module' cannot be imported"):
        resolve_backend(config)


async def test_nothing_stays_open_when_a_backend_cannot_be_finalized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with fleet_of({"w": torch.randn(8, 8)}, tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        engine = fleet.trainers[0].member._engine
        wires, finalize = list(engine._wires), engine._engine.finalize

        def fail() -> None:
            finalize()
            raise ValueError("already gone")

        monkeypatch.setattr(engine._engine, "finalize", fail)
        with pytest.raises(TransportError, match="QueueEngine.finalize: ValueError: already gone"):
            engine.finalize()
        assert [wire._registered for wire in wires] == [{}, {}]
        assert engine._wires == []
