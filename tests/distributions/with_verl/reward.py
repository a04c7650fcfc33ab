"""A reward that differs between answers, which random models never get right."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    return sum(map(ord, solution_str)) % 7 / 7
