"""Counts steps whose updates are skipped for non-finite gradients, and ends a run of too many."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import isfinite

from verl.utils.failures import NamedFailure

logger = logging.getLogger(__name__)

KEYS = ("actor/skipped_steps", "critic/skipped_steps")


class Diverged(NamedFailure):
    """The run has diverged: the updates of too many steps in a row were skipped."""


class SkippedSteps:
    """Checks every step of a run. Used on the driver."""

    def __init__(self, most: int) -> None:
        """`most` skipped steps in a row end the run."""
        self._most = most
        self._first = 0
        self.in_a_row = 0
        """Steps, up to the last one, in which an update was left out. One that is made again counts once."""

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check `step` after its update. Warns of the first skipped step; raises Diverged after `most` in a row."""
        skipped = {key: metrics[key] for key in KEYS if metrics.get(key)}
        if not skipped:
            self.in_a_row = 0
            return
        is_first = not self.in_a_row or step < self._first
        if is_first:
            self._first = step
        self.in_a_row, cause = step - self._first + 1, _cause(metrics)
        if is_first:
            counts = " and ".join(f"{count:g} of the {key.partition('/')[0]}'s" for key, count in skipped.items())
            logger.warning("step %d: %s optimizer steps were left out: %s", step, counts, cause)
        if self.in_a_row >= self._most:
            whose = " and ".join(key.partition("/")[0] for key in skipped)
            raise Diverged(
                f"since step {self._first} each of {self.in_a_row} steps skipped an update: {cause}. Nothing is "
                f"learned any more by the {whose}. Resume from an earlier checkpoint (trainer.resume_mode=resume_path) "
                "with a lower learning rate, or check the rewards for NaN. The limit is trainer.max_skipped_steps"
            )


def _cause(metrics: Mapping[str, float]) -> str:
    """What is known of it: gradients alone, or what they come from, too."""
    parts = ("actor/", "critic/", "rollout_corr/")
    wrong = [key for key, value in metrics.items() if key.startswith(parts) and not isfinite(value)]
    others = [key for key in wrong if not key.endswith("grad_norm")]
    if not others:
        return "the gradients' norm is not finite, though the loss is"
    return f"not finite are {', '.join(others[:5])}, and with them the gradients"
