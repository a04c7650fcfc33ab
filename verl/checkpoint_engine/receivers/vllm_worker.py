"""What vLLM's worker class gets in addition, by `worker_extension_cls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LoadsVersions:
    """A base class of every vLLM worker of a job; its methods are for vLLM's `collective_rpc`."""

    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def load_version(self, arena_path: str, version: int) -> None:
        """A whole weight update from the arena: three calls, when a client makes them, each a round trip to all ranks.

        Raises what `ArenaWeightTransferEngine.receive_weights` does, on the last rank alone. No rank has the update
        open afterwards.
        """
        self.start_weight_update()
        self.update_weights({"arena_path": arena_path, "version": version})
        self.finish_weight_update()
