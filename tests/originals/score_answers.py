"""Scores of answers by whichever verl is first on the path: a JSON list of (source, response, truth) comes in.

Run as a file, with PyPI's verl or this project in front. Prints a JSON list: {score, acc, pred}, or {error}.
"""

import json
import re
import sys
from types import ModuleType, SimpleNamespace

from verl.utils.reward_score import default_compute_score


def stand_in_for_mathruler() -> None:
    """With which verl's rule for Geometry3K compares, and which is not installed: here answers are right that are the
    truth's text. The form of a response, and what it weighs, are verl's."""
    package: object = ModuleType("mathruler")
    sys.modules["mathruler"] = package  # type: ignore[assignment]
    sys.modules["mathruler.grader"] = SimpleNamespace(  # type: ignore[assignment]
        extract_boxed_content=lambda text: (re.findall(r"\\boxed\{([^{}]*)\}", text) or ["None"])[-1],
        grade_answer=lambda given, truth: given.strip() == truth.strip(),
    )


def scored(source: str, response: str, truth: str) -> dict[str, object]:
    try:
        found = default_compute_score(source, response, truth)
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": type(exc).__name__}
    if not isinstance(found, dict):
        return {"score": float(found)}
    return {"score": float(found["score"]), "acc": bool(found["acc"]), "pred": found["pred"]}


if __name__ == "__main__":
    stand_in_for_mathruler()
    sys.stdout.write("\n" + json.dumps([scored(*case) for case in json.load(sys.stdin)]))
