"""Steps of a run and of its schedules by PyPI's verl: a list of (options, rows of training data) comes in as JSON.

Run as a file with PyPI's verl in front. Prints, for each, the steps of the run, of the actor's schedule and of the
critic's.
"""

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import verl
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

DEFAULTS = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")


class Trainer(RayPPOTrainer):
    """Its data loaders alone."""

    def __init__(self, config: Any) -> None:
        self.config = config


def steps(options: dict[str, Any], rows: int) -> list[int]:
    config = deepcopy(DEFAULTS)
    for key, value in {"data.dataloader_num_workers": 0, **options}.items():
        OmegaConf.update(config, key, value)
    trainer = Trainer(config)
    trainer._create_dataloader(list(range(rows)), [0], list, None)
    optims = (config.actor_rollout_ref.actor.optim, config.critic.optim)
    return [trainer.total_training_steps, *(optim.total_training_steps for optim in optims)]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([steps(*case) for case in json.load(sys.stdin)]))
