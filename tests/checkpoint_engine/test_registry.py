"""Backends by name: what a user may write, and what a wrong word gets."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_engine.fakes import Fleet, later
from verl.checkpoint_engine.backends.naive import NaiveEngine
from verl.checkpoint_engine.backends.one_sided import OneSidedEngine
from verl.checkpoint_engine.backends.tcp import TcpWire
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import BackendUnavailable, ConfigError
from verl.checkpoint_engine.plan.topology import Topology
from verl.checkpoint_engine.plan.types import Member
from verl.checkpoint_engine.registry import BUILTIN, Backend, CheckpointEngineRegistry, resolve_backend

OUTBOX = "tests.checkpoint_engine.outbox_backend"


def resolve(**values: Any) -> Any:
    return resolve_backend(CheckpointEngineConfig.from_mapping(values))


def test_the_default_backend_is_there():
    assert resolve() is NaiveEngine
    engine = CheckpointEngineRegistry.new(
        "naive", member=Member(role="trainer", index=0, host="here"), config=CheckpointEngineConfig()
    )
    assert isinstance(engine, NaiveEngine)


def test_an_unknown_backend_gets_the_nearest_name_and_the_list():
    with pytest.raises(ConfigError) as raised:
        resolve(backend="naiv")
    message = str(raised.value)
    assert "checkpoint_engine.backend='naiv' is not registered" in message
    assert "Did you mean 'naive'?" in message
    assert re.search(r"Known: .*\bnaive\b", message)
    assert "custom_backend_module" in message


def test_a_manager_with_an_unknown_backend_is_not_built(tmp_path: Path):
    with pytest.raises(ConfigError, match="checkpoint_engine.backend='carrier-pigeon' is not registered"):
        Fleet({"w": torch.zeros(1)}, tmp_path, backend="carrier-pigeon")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    target = "a_package_that_nobody_has.engine:Engine"
    monkeypatch.setitem(BUILTIN, "pigeon", Backend(target=target, remedy="pip install 'verl-sync[fast]'"))
    with pytest.raises(BackendUnavailable) as raised:
        CheckpointEngineRegistry.get("pigeon")
    message = str(raised.value)
    assert "checkpoint_engine.backend=pigeon needs the package 'a_package_that_nobody_has'" in message
    assert "pip install 'verl-sync[fast]'" in message


def test_options_of_an_unknown_backend_are_refused():
    with pytest.raises(ConfigError, match=r"engine_kwargs\.naiv: no such backend\. Did you mean 'naive'\?"):
        resolve(engine_kwargs={"naiv": {}})


def test_an_unknown_option_of_a_known_backend_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint_engine\.engine_kwargs\.naive\.speed"):
        resolve(engine_kwargs={"naive": {"speed": "high"}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backends": "naive"}, r"unknown configuration key 'checkpoint_engine\.backends'\. Did you mean 'backend'\?"),
        ({"slots": 3}, r"checkpoint_engine\.slots=3 is not one of: 1, 2"),
        ({"activation": "rollin"}, r"Did you mean 'rolling'\?"),
        ({"retries": -1}, "retries must be at least 0, not -1"),
        ({"block_kilobytes": 1}, "block_kilobytes must be at least 4, not 1"),
        ({"update_weights_bucket_megabytes": 0}, "must be at least 1, not 0"),
        ({"deadlines": {"publish_s": 0}}, "publish_s must be above 0"),
        ({"deadlines": {"publsh_s": 1}}, "Did you mean 'publish_s'"),
    ],
)
def test_a_wrong_key_or_value_is_refused_on_the_driver(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        CheckpointEngineConfig.from_mapping(values)


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"custom_backend_module='no_such_module' cannot be imported"):
        resolve(custom_backend_module="no_such_module")


async def test_a_backend_of_the_users_own_works_like_a_built_in_one(tmp_path: Path):
    tensors = {"w": torch.randn(64, 33), "wide": torch.randn(3, 5000), "scale": torch.randn(())}
    async with Fleet(
        tensors, tmp_path, trainers=3, backend="outbox", custom_backend_module=OUTBOX, block_kilobytes=4
    ) as fleet:
        async for _, report in fleet.three_versions(later(tensors)):
            assert report.backend == "outbox"
            assert report.nbytes_moved == 2 * report.nbytes_needed
    assert "outbox" in CheckpointEngineRegistry.names()


def test_a_name_that_is_taken_cannot_be_registered_again():
    assert resolve(backend="outbox", custom_backend_module=OUTBOX).__name__ == "OutboxEngine"
    for name in ("naive", "outbox"):
        with pytest.raises(ValueError, match=f"{name!r} is already registered"):

            @CheckpointEngineRegistry.register(name)
            class Another(NaiveEngine):
                pass

    assert sys.modules[OUTBOX].OutboxEngine is CheckpointEngineRegistry.get("outbox")


class MyWire(TcpWire):
    """A whole one; the tests below take something from it."""


@CheckpointEngineRegistry.register("mine-over-a-wire")
class OverMyWire(OneSidedEngine):
    def open_wire(self, topology: Topology | None) -> MyWire:
        return MyWire("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({}, None),
        ({"read": lambda self, owner, source, target: None}, r"MyWire\.read\(self, owner, source, target\): too many"),
        ({"admit": lambda self: None}, r"MyWire\.admit\(self\): too many .*Wire has admit\(self, admission"),
        ({"close": None}, r"MyWire has no method close\(self\)"),
        ({"__abstractmethods__": frozenset({"is_done"})}, r"MyWire lacks is_done of .*links\.wire\.Wire"),
    ],
)
def test_a_wire_that_lacks_a_method_or_an_argument_is_refused_before_work_starts(members, said, monkeypatch):
    for name, member in members.items():
        monkeypatch.setattr(MyWire, name, member, raising=False)
    if said is None:
        assert resolve(backend="mine-over-a-wire") is OverMyWire
    else:
        with pytest.raises(ConfigError, match=f"^checkpoint_engine.backend=mine-over-a-wire: .*{said}"):
            resolve(backend="mine-over-a-wire")


def test_a_module_of_a_backend_that_fails_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "failing_backend.py").write_text("from verl.checkpoint_engine import NoSuchName")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'failing_backend' cannot be imported: ImportError: .*NoSuchName"):
        resolve(custom_backend_module="failing_backend")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"step_megabyte": 1}, r"step_megabyte.*step_megabytes"), ({"step_megabytes": 0}, "step_megabytes")],
)
def test_options_of_a_users_backend_are_checked_with_those_of_the_others(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(
            backend="process_memory",
            custom_backend_module="examples.custom_wire",
            engine_kwargs={"process_memory": options},
        )
