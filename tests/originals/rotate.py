"""Which checkpoints PyPI's verl leaves: a JSON list of {keep, runs, folder} comes in, a run is a list of steps.

Each gives the steps that are left after every save. Run as a file with PyPI's verl in front.
"""

import json
import sys
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager, find_latest_ckpt_path


class Manager(BaseCheckpointManager):
    """Keeps count of folders; nothing else of it is there."""

    def __init__(self) -> None:
        self.previous_saved_paths: list[str] = []
        self.rank = 0


def left(given: dict[str, Any]) -> list[list[int]]:
    root, found = Path(given["folder"]), []
    for steps in given["runs"]:
        manager = Manager()
        for step in steps:
            path = root / f"global_step_{step}"
            manager.ensure_checkpoint_capacity(given["keep"])
            path.mkdir(parents=True, exist_ok=True)
            manager.register_checkpoint(str(path), given["keep"])
            found.append(sorted(int(each.name.rpartition("_")[2]) for each in root.iterdir()))
    return found


def latest(folder: str) -> str | None:
    found = find_latest_ckpt_path(folder)
    return None if found is None else Path(found).name


if __name__ == "__main__":
    given = json.load(sys.stdin)
    found = {"left": [left(each) for each in given["cases"]], "latest": [latest(each) for each in given["written"]]}
    sys.stdout.write("\n" + json.dumps(found))
