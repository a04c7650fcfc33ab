"""What the trainer asks of whoever generates, and generation that outlives the death of a rollout engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from verl.protocol import DataProto

logger = logging.getLogger(__name__)


class Rollouts(Protocol):
    """Generation, however many engines and agent loops it takes."""

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row of `prompts`, in order: the generated columns alone, and `meta_info["timing"]`.

        `meta_info["validate"]` of the prompts selects validation sampling.
        """

    def set_servers(self, server_handles: Sequence[Any]) -> None:
        """Use these servers from the next batch on."""


class Engines(Protocol):
    """The rollout engines of a run; `Cluster` is one."""

    @property
    def server_handles(self) -> list[Any]:
        """Servers of the engines in service."""

    def heal(self) -> int:
        """Restart what died; how many are back in service. Raises if none is in service."""


class HealingRollouts:
    """`Rollouts` that has dead engines restarted and then generates the batch again, whole.

    While another engine lives, the agent loops send the dead one's requests there, and nobody gets to see a failure.
    """

    def __init__(self, rollouts: Rollouts, engines: Engines, *, max_restarts: int) -> None:
        """A batch that fails is generated again at most `max_restarts` times."""
        self._rollouts = rollouts
        self._engines = engines
        self._max_restarts = max_restarts

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Raises what the last attempt raised, or at once if no engine had died: it was not for that reason then."""
        for _ in range(self._max_restarts):
            try:
                return self._rollouts.generate_sequences(prompts)
            except Exception:
                if not self._engines.heal():
                    raise
                self._rollouts.set_servers(self._engines.server_handles)
                logger.warning("generating the batch of %d samples again", len(prompts))
        return self._rollouts.generate_sequences(prompts)

    def set_servers(self, server_handles: Sequence[Any]) -> None:
        self._rollouts.set_servers(server_handles)
