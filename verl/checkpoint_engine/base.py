"""The names that verl's `verl.checkpoint_engine.base` has."""

from __future__ import annotations

from .checkpoint_engine import Capabilities, CheckpointEngine, CheckpointEngineWithCache
from .plan.types import TensorMeta
from .registry import CheckpointEngineRegistry
from .sync.manager import CheckpointEngineManager

__all__ = [
    "Capabilities",
    "CheckpointEngine",
    "CheckpointEngineManager",
    "CheckpointEngineRegistry",
    "CheckpointEngineWithCache",
    "TensorMeta",
]
