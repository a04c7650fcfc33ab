"""The engine `hf`, which writes down every token that it samples: also those that are lost when it is killed.

For `make soak`, as `rollout.name=counted`.
"""

from __future__ import annotations

import os
from pathlib import Path

from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.hf.engine import HFEngine
from verl.workers.rollout.hf.replica import HFReplica
from verl.workers.rollout.registry import RolloutReplicaRegistry

NAME = "counted"


@RolloutReplicaRegistry.register(NAME)
class CountedReplica(HFReplica):
    engine = "benchmarks.counted_engine:CountedEngine"


class CountedEngine(HFEngine):
    """`engine_kwargs.counted.directory`: where each process writes a file, with a byte for each token."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        directory = Path(spec.config.engine_kwargs[NAME]["directory"])
        self._counts = os.open(directory / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _record(self, tokens: list[int], log_probs: list[float]) -> None:
        os.write(self._counts, bytes(len(tokens)))
        super()._record(tokens, log_probs)


def sampled(directory: Path) -> int:
    """Tokens of all engines."""
    return sum(path.stat().st_size for path in directory.iterdir())
