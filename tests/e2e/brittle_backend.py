"""gloo, but the third version never reaches a rollout node."""

from __future__ import annotations

from verl.checkpoint_engine.arena import NodeArena
from verl.checkpoint_engine.backends.collective import GlooEngine
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.registry import CheckpointEngineRegistry

NAME = "brittle"
LAST_VERSION = 1


@CheckpointEngineRegistry.register(NAME)
class BrittleEngine(GlooEngine):
    name = NAME

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        if version > LAST_VERSION:
            raise TransportError("the wire is cut", version=version, phase="stage")
        return super().receive_weights(version, arena)
