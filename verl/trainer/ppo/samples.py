"""Samples that people want to read: JSONL files and a few on the console."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from verl.protocol import DataProto
from verl.utils import records
from verl.workers.reward_manager import RewardOutput

logger = logging.getLogger(__name__)


class SampleWriter:
    """Writes `<directory>/<step>.jsonl`, one line per sample; does nothing without a directory.

    What an earlier run, killed after its last checkpoint, wrote about the same step is replaced.
    """

    def __init__(self, directory: str | Path | None) -> None:
        self._directory = Path(directory) if directory else None
        self._begun: set[int] = set()

    def write(self, step: int, batch: DataProto, reward: RewardOutput) -> None:
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{step}.jsonl"
        if step not in self._begun:
            path.unlink(missing_ok=True)
        self._begun.add(step)
        records.append(path, [records.encoded({"step": step, **row}) for row in _rows(batch, reward)])

    @staticmethod
    def show(batch: DataProto, reward: RewardOutput, count: int) -> None:
        for row in _rows(batch, reward)[:count]:
            logger.info("held-out sample: %s", json.dumps(row, default=str))


def _rows(batch: DataProto, reward: RewardOutput) -> list[dict[str, object]]:
    columns = batch.non_tensor_batch
    scores = reward.reward_tensor.sum(-1).tolist()
    return [
        {
            "uid": columns["uid"][index],
            "prompt": columns["raw_prompt"][index],
            "response": reward.responses[index],
            "ground_truth": (columns["reward_model"][index] or {}).get("ground_truth"),
            "score": scores[index],
        }
        for index in range(len(batch))
    ]
