"""The backends that the contract suite runs over. A new one is one line here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

import examples.custom_wire
from verl.checkpoint_engine.registry import CheckpointEngineRegistry

PACKAGES = {
    "naive": (),
    "gloo": (),
    "tcp": (),
    "nixl": ("nixl",),
    "mooncake": ("mooncake",),
    "kimi_ckpt_engine": ("mooncake",),
}
"""What each needs. `nccl` and `hccl` take a device per member, so a process: see test_device_collectives.py."""
EXAMPLE = "process_memory"
assert examples.custom_wire.ProcessMemoryEngine is CheckpointEngineRegistry.get(EXAMPLE)
QUICK = ("naive", "gloo", "tcp", "nixl", EXAMPLE)
SLOW = ("mooncake", "kimi_ckpt_engine")
"""Mooncake's engine takes a second to end and holds Python's lock meanwhile: its members share fewer tests."""


def using(name: str, *values: Any) -> Any:
    """The parameters (name, *values) of a test, skipped where a package that the backend `name` needs is missing."""
    missing = [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]
    reason = f"{name} needs {', '.join(missing)}, not installed here"
    return pytest.param(name, *values, marks=pytest.mark.skipif(bool(missing), reason=reason))


BACKENDS = [using(name) for name in (*PACKAGES, EXAMPLE)]
CHAINS = [using("tcp"), using("nixl"), using("mooncake")]
"""Those that can follow `topology=chain`."""


def nbytes_moved(name: str, payload_nbytes: int, nodes: int) -> int:
    """What a report says for a model of `payload_nbytes`: all but `naive` copy it once on the trainer side, too."""
    return payload_nbytes * (nodes + (name != "naive"))
