"""Batches of PyPI's verl's sampler and loader: a list of {rows, batch_size, shuffle, seed} comes in as JSON.

Run as a file with PyPI's verl in front. Prints, for each, the batches of three epochs.
"""

import json
import sys
from typing import Any

from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.ppo.utils import create_rl_sampler


def epochs(case: dict[str, Any]) -> list[list[list[int]]]:
    rows = list(range(case["rows"]))
    sampler = create_rl_sampler(OmegaConf.create({"shuffle": case["shuffle"], "seed": case["seed"]}), rows)
    loader = StatefulDataLoader(rows, case["batch_size"], sampler=sampler, drop_last=True, collate_fn=list)
    return [list(loader) for _ in range(3)]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([epochs(case) for case in json.load(sys.stdin)]))
