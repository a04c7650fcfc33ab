"""What PyPI's verl calls the results of validations: a JSON list of {sources, uids, infos, turns} comes in.

Run as a file with PyPI's verl in front. Prints a JSON list of {name: value}, or {error}.
"""

import json
import sys
from typing import Any

import numpy as np

from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class Trainer(RayPPOTrainer):
    """Names metrics; nothing else of it is there."""

    def __init__(self) -> None:
        pass


def named(given: dict[str, Any]) -> dict[str, Any]:
    turns = [np.array(given["turns"])] if given["turns"] else []
    try:
        found = Trainer()._val_metrics_update(np.array(given["sources"]), given["uids"], given["infos"], turns)
        return {name: float(value) for name, value in found.items()}
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": f"{type(exc).__name__}: {exc}"}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([named(each) for each in json.load(sys.stdin)]))
