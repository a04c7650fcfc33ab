"""Whether verl takes our adapter, and what is said where it does not. Run against the wheel: see `test_for_verl.py`."""

from __future__ import annotations

import runpy
import sys
from importlib import metadata

import pytest
from verl_sync.errors import ConfigError
from verl_sync.for_verl import receiver, registration

import verl
from verl.workers.rollout import base


def test_verl_has_imported_the_plugin_and_makes_our_adapter():
    assert verl.__version__ == "0.9.1"
    registration.require_registered()
    assert base.get_rollout_class("vllm", "async").__module__ == "verl_sync.for_verl.rollout"


def test_an_engine_does_not_start_where_verl_has_another_adapter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(base._ROLLOUT_REGISTRY, ("vllm", "async"), "verl.workers.rollout.vllm_rollout.ServerAdapter")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    with pytest.raises(ConfigError, match="VERL_USE_EXTERNAL_PLUGINS=none leaves it out: add verl_sync, or unset"):
        receiver.ForVerlWeightTransferEngine()
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match="install the wheel that brings `verl_sync`"):
        registration.require_registered()


def test_a_plugin_that_fails_says_so_although_verl_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delitem(base._ROLLOUT_REGISTRY, ("vllm", "async"))
    monkeypatch.delitem(sys.modules, "verl_sync.for_verl.plugin")
    with pytest.raises(ConfigError):
        runpy.run_module("verl_sync.for_verl.plugin")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verl_sync: verl goes on without our rollout adapter (verl 0.9.1 has no rollout adapter")


def test_the_command_line_says_how_to_turn_it_on(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("verl_sync.for_verl", run_name="__main__")
    assert ended.value.code == 0
    assert registration.SWITCH in capsys.readouterr().out
