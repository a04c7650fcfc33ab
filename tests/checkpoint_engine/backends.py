"""The backends that the contract suite runs over. A new one is one line here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from verl.checkpoint_engine.registry import CheckpointEngineRegistry


def backend(name: str, *modules: str) -> object:
    """`name` as a test parameter, skipped where one of `modules`, which it needs, is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.param(
        name, marks=pytest.mark.skipif(bool(missing), reason=f"{name} needs {', '.join(missing)}, not installed here")
    )


BACKENDS = [
    backend("naive"),
    backend("gloo"),
    backend("nixl", "nixl"),
    backend("mooncake", "mooncake"),
]
"""`nccl` and `hccl` take a device per member and so a process per member: see test_device_collectives.py."""


CHAINS = BACKENDS[2:]
"""Those that can follow `topology=chain`."""


def nbytes_moved(name: str, payload_nbytes: int, nodes: int) -> int:
    """What a report says for a model of `payload_nbytes`: a staged backend copies it once on the trainer side, too."""
    staged = CheckpointEngineRegistry.get(name).capabilities.staged
    return payload_nbytes * (nodes + staged)
