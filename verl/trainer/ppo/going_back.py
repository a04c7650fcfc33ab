"""What a run whose trainer ranks were lost goes on from, when they do not remember their last step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StateLost(Exception):
    """Trainer ranks were started again, without the state of the step under way. Its cause is why they were."""


@dataclass(frozen=True)
class Beginning:
    """Where a run began."""

    checkpoint: Path | None
    """That it was resumed from."""
    prompts: dict[str, Any]
    """State of the data loader."""
    kl_coef: float
