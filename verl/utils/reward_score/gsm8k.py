"""GSM8K: the number after the last `####`, compared as text."""

from __future__ import annotations

import re
from typing import Literal

READ_CHARACTERS = 300
"""Only the response's last characters are searched, because a long response takes time."""
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The answer in a response. `strict` requires `#### 12`; `flexible` accepts the last number after any text.

    Removes commas and nothing else: `12.0` is not `12`. None without an answer.
    """
    end = solution_str[-READ_CHARACTERS:]
    if method == "strict":
        found = _STRICT.findall(end)
        return found[-1].replace(",", "") if found else None
    if method == "flexible":
        numbers = [text for text in _NUMBER.findall(end) if text not in ("", ".")]
        return numbers[-1] if numbers else None
    raise ValueError(f"method is strict or flexible, not {method!r}")


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for another one, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
