"""Training checkpoints on disk: `<output_dir>/global_step_N`, complete or absent.

    global_step_40/
        actor/            what the training engine writes (torch distributed checkpoint, huggingface/)
        critic/           the same of the critic, if there is one
        data.pt           position of the data loader
        trainer.json      step, KL coefficient, held-out rewards so far
    latest_checkpointed_iteration.txt

A checkpoint is written under a temporary name and renamed; the pointer is replaced after that. A run that is killed at
any moment therefore finds its last complete checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.utils.config import ConfigError
from verl.utils.files import sync_to_disk
from verl.workers.config import TrainerConfig

LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class TrainerState:
    """What the driver needs to go on. `dataloader` is the loader's own state_dict."""

    step: int
    dataloader: dict[str, Any]
    kl_coef: float
    rewards_before: dict[str, float]


class CheckpointDirectory:
    """The checkpoints of one run. Used on the driver."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        # Trainer ranks on other hosts have other working directories.
        self.root = Path(config.output_dir).absolute()

    def find(self) -> Path | None:
        """The checkpoint to resume from as `trainer.resume_mode` says; None to start from scratch.

        Raises ConfigError if the one that was asked for does not exist or is not complete.
        """
        mode = self._config.resume_mode
        if mode == "disable":
            return None
        if mode == "resume_path":
            path = Path(str(self._config.resume_from_path)).absolute()
            if not (path / "trainer.json").is_file():
                raise ConfigError(f"trainer.resume_from_path={path} is not a checkpoint: it has no trainer.json")
            return path
        pointer = self.root / LATEST
        if not pointer.is_file():
            return None
        path = self.root / f"global_step_{pointer.read_text().strip()}"
        if not (path / "trainer.json").is_file():
            raise ConfigError(
                f"{pointer} points to {path}, which is not a complete checkpoint; "
                "set trainer.resume_mode=disable to start again"
            )
        return path

    @contextmanager
    def writing(self, state: TrainerState) -> Iterator[Path]:
        """A directory for the trainer ranks; the checkpoint appears when the block ends without an error."""
        self.root.mkdir(parents=True, exist_ok=True)
        final = self.root / f"global_step_{state.step}"
        partial = self.root / f".global_step_{state.step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        torch.save(state.dataloader, partial / "data.pt")
        record = {"step": state.step, "kl_coef": state.kl_coef, "rewards_before": state.rewards_before}
        (partial / "trainer.json").write_text(json.dumps(record))
        sync_to_disk(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        pointer = self.root / f".{LATEST}"
        pointer.write_text(str(state.step))
        sync_to_disk(self.root)
        pointer.rename(self.root / LATEST)
        self._delete_old()

    @staticmethod
    def read(path: Path) -> TrainerState:
        record = json.loads((path / "trainer.json").read_text())
        dataloader = torch.load(path / "data.pt", weights_only=False)
        return TrainerState(record["step"], dataloader, record["kl_coef"], record["rewards_before"])

    def _delete_old(self) -> None:
        keep = self._config.max_actor_ckpt_to_keep
        if keep is None:
            return
        found = {
            int(match[1]): path
            for path in self.root.iterdir()
            if (match := re.fullmatch(r"global_step_(\d+)", path.name))
        }
        for step in sorted(found)[: max(len(found) - keep, 0)]:
            shutil.rmtree(found[step])
