"""Move weights from trainers to rollout engines in transactions. See docs/architecture.md.

    config = CheckpointEngineConfig.from_mapping({"backend": "naive"})
    ranks = [TrainerRank(rank, source, config) for rank, source in enumerate(sources)]     # or ports to where they run
    node = RolloutNode(0, config, job="my-job", shm_dir=Path("/dev/shm"))                  # or its port

    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=[node])
    await manager.add_replicas(replicas)
    for step in range(steps):
        ...                                                # train
        report = await manager.update_weights(step)        # every replica serves version `step`, or SyncAborted
    await manager.close()

or, for any training loop, without ports: `WeightPublisher`.

Importing this package loads none of torch, ray or vllm: names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint_engine import CheckpointEngine, CheckpointEngineWithCache
    from .config import CheckpointEngineConfig
    from .errors import (
        ActivationError,
        BackendUnavailable,
        CheckpointEngineError,
        ConfigError,
        IntegrityError,
        PlanError,
        SyncAborted,
        TransportError,
        TransportTimeout,
    )
    from .plan.types import SyncReport, TensorMeta
    from .publisher import TRLWeightTransfer, WeightPublisher
    from .registry import CheckpointEngineRegistry
    from .sync.manager import CheckpointEngineManager
    from .sync.rollout_node import RolloutNode
    from .sync.trainer_rank import TrainerRank

_MODULES = {
    "checkpoint_engine": ("CheckpointEngine", "CheckpointEngineWithCache"),
    "config": ("CheckpointEngineConfig",),
    "errors": (
        "ActivationError",
        "BackendUnavailable",
        "CheckpointEngineError",
        "ConfigError",
        "IntegrityError",
        "PlanError",
        "SyncAborted",
        "TransportError",
        "TransportTimeout",
    ),
    "sync.manager": ("CheckpointEngineManager",),
    "sync.rollout_node": ("RolloutNode",),
    "sync.trainer_rank": ("TrainerRank",),
    "publisher": ("TRLWeightTransfer", "WeightPublisher"),
    "registry": ("CheckpointEngineRegistry",),
    "plan.types": ("SyncReport", "TensorMeta"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ActivationError",
    "BackendUnavailable",
    "CheckpointEngine",
    "CheckpointEngineConfig",
    "CheckpointEngineError",
    "CheckpointEngineManager",
    "CheckpointEngineRegistry",
    "CheckpointEngineWithCache",
    "ConfigError",
    "IntegrityError",
    "PlanError",
    "RolloutNode",
    "SyncAborted",
    "SyncReport",
    "TensorMeta",
    "TrainerRank",
    "TransportError",
    "TransportTimeout",
    "TRLWeightTransfer",
    "WeightPublisher",
]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
