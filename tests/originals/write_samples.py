"""The line that PyPI's verl writes about a sample to `trainer.rollout_data_dir`; run as a file with it in front."""

import json
import sys
import tempfile
from pathlib import Path

from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class Trainer(RayPPOTrainer):
    """Writes samples; nothing else of it is there."""

    def __init__(self) -> None:
        self.global_steps = 3
        self._init_dump_executor()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer()
        trainer._dump_generations(**json.load(sys.stdin), dump_path=directory)
        trainer._dump_executor.shutdown()
        [file] = Path(directory).iterdir()
        sys.stdout.write("\n" + json.dumps([file.name, *map(json.loads, file.read_text().splitlines())]))
