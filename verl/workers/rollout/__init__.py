"""Rollout: inference engines behind one replica interface. Names are resolved on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.workers.rollout.base import Placement, RolloutReplica, launch_all
    from verl.workers.rollout.records import RolloutMode, SamplingOptions, TokenOutput, WeightVersionSpan
    from verl.workers.rollout.registry import RolloutReplicaRegistry

_HOME = {
    "Placement": "base",
    "RolloutMode": "records",
    "RolloutReplica": "base",
    "RolloutReplicaRegistry": "registry",
    "SamplingOptions": "records",
    "TokenOutput": "records",
    "WeightVersionSpan": "records",
    "launch_all": "base",
}

__all__ = [
    "Placement",
    "RolloutMode",
    "RolloutReplica",
    "RolloutReplicaRegistry",
    "SamplingOptions",
    "TokenOutput",
    "WeightVersionSpan",
    "launch_all",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
