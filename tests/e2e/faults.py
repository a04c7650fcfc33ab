"""Trainer ranks that kill themselves: who is to die when. The ranks load `dying_ranks.py` for that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MODULE = "tests.e2e.dying_ranks"
"""For `actor_rollout_ref.model.external_lib`."""
DIRECTORY = "faults"
FROM_MEMORY = r"(?:0, from the beginning|\d, from memory)"
"""Where trainer ranks go on. The beginning's state may not be in memory yet when they die in the first step."""
LOG_PROBS, UPDATE, PUBLISH, SAVE, REMEMBER, WRITE = (
    "compute_log_prob",
    "train_mini_batch",
    "publish",
    "save_checkpoint",
    "copy",
    "write",
)


def plan(model: Path, faults: Sequence[tuple[int, int, str]]) -> None:
    """(step, rank, what it does then). Of updates it is the second mini-batch: one optimizer step has been made."""
    (model / DIRECTORY).mkdir()
    for step, rank, what in faults:
        (model / DIRECTORY / f"{step}-{rank}-{what}").touch()
