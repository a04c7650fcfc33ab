"""Compare a family that sees with transformers in this process alone, which is the only rank.

python -m tests.workers.engine.seen_process FAMILY FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.engine.test_seeing import WAYS, compare


class OneRank:
    """In the place of several processes."""

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        return [function(*arguments)]


def main() -> None:
    family, folder = sys.argv[1], Path(sys.argv[2])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        for number, way in enumerate(WAYS):
            compare(OneRank(), family, way, folder / str(number))
    finally:
        dist.destroy_process_group()
    sys.stdout.write(f"{family} is right in {len(WAYS)} ways\n")


if __name__ == "__main__":
    main()
