"""gloo, but from the third version on the rollout node does not receive what the trainer sends: once, or ever."""

from __future__ import annotations

from verl.checkpoint_engine.backends.collective import GlooEngine
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.registry import CheckpointEngineRegistry

LAST_VERSION = 1
"""That arrives at the first attempt."""


@CheckpointEngineRegistry.register("broken")
class BrokenEngine(GlooEngine):
    name = "broken"

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        if version > LAST_VERSION:
            raise TransportError("the wire is cut", version=version, phase="stage")
        return super().receive_weights(version, arena)


@CheckpointEngineRegistry.register("brittle")
class BrittleEngine(GlooEngine):
    name = "brittle"
    failed = False

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        if version > LAST_VERSION and not BrittleEngine.failed:
            BrittleEngine.failed = True
            raise TransportError("the wire is cut", version=version, phase="stage")
        return super().receive_weights(version, arena)
