"""What a run whose trainer ranks were lost goes on from, when they do not remember their last step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.ppo.step import Step


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


@dataclass(frozen=True)
class Learned:
    """A step, as it was before it was learned."""

    now: Step
    batch: DataProto
    kl_coef: float
