"""A reward for models that have learned nothing, which differs between their answers, so that they can learn."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of digits in the answer."""
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))
