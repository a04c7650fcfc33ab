"""Scores of answers by whichever verl is first on the path: a JSON list of (source, response, truth) comes in.

Run as a file, with PyPI's verl or this project in front. Prints a JSON list: {score, acc, pred}, or {error}.
"""

import json
import sys

from verl.utils.reward_score import default_compute_score


def scored(source: str, response: str, truth: str) -> dict[str, object]:
    try:
        found = default_compute_score(source, response, truth)
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": type(exc).__name__}
    if not isinstance(found, dict):
        return {"score": float(found)}
    return {"score": float(found["score"]), "acc": bool(found["acc"]), "pred": found["pred"]}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([scored(*case) for case in json.load(sys.stdin)]))
