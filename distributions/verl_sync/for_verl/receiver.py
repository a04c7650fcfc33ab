"""Inside of the vLLM workers of PyPI's verl: loads from the arena that the rollout adapter publishes into."""

from __future__ import annotations

from typing import Any

from ..engines.vllm.receiver import ArenaWeightTransferEngine
from .registration import require_registered


class ForVerlWeightTransferEngine(ArenaWeightTransferEngine):
    """Does not start where verl's own adapter would send the weights another way: nobody would notice."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Raises ConfigError."""
        require_registered()
        super().__init__(*arguments, **named)
