"""Samples that people want to read: JSONL files and a few on the console."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.support import records
from verl.protocol import DataProto, tensors_of
from verl.workers.reward_manager import RewardOutput

logger = logging.getLogger(__name__)

_COLUMNS = {
    "uid": "uid",
    "index": "index",
    "data_source": "data_source",
    "prompt": "raw_prompt",
    "replicas": "__replicas__",
    "num_turns": "__num_turns__",
    "stop_reason": "__stop_reason__",
}
"""What a file of samples calls a column of the batch."""


class SampleWriter:
    """Writes `<directory>/<step>.jsonl`, one line per sample; does nothing without a directory.

    `response_ids`, `response_mask` (1: the policy generated it), `versions` (of the weights; -1: inserted) and
    `log_probs` (the engine's; null where it was not asked) have one entry per token of the response. `replicas` are
    `[name, start, stop]`: which engine generated tokens `[start, stop)`. `reward` is all that the reward function said.

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

    def forget_after(self, step: int) -> None:
        """What has been written about later steps is replaced by what comes next about them."""
        self._begun = {begun for begun in self._begun if begun <= step}

    @staticmethod
    def show(batch: DataProto, reward: RewardOutput, count: int) -> None:
        for row in _rows(batch[:count], reward) if count else ():
            logger.info("held-out sample: %s", records.encoded(_told(row)).decode())


def _rows(batch: DataProto, reward: RewardOutput) -> list[dict[str, Any]]:
    """All there is to say about each sample: what was asked, who answered what with which weights, its reward."""
    columns, tensors = batch.non_tensor_batch, tensors_of(batch)
    width = tensors["responses"].shape[1]
    prompt_mask, response_mask = tensors["attention_mask"].bool().split((tensors["prompts"].shape[1], width), dim=1)
    scores = reward.reward_tensor.sum(-1).tolist()
    per_token = {
        name: tensors.get(key)
        for name, key in (
            ("response_ids", "responses"),
            ("response_mask", "response_mask"),
            ("versions", "rollout_versions"),
            ("log_probs", "rollout_log_probs"),
        )
    }
    rows = []
    for index in range(len(batch)):
        row: dict[str, Any] = {name: columns[key][index] for name, key in _COLUMNS.items() if key in columns}
        row |= {
            "response": reward.responses[index],
            "ground_truth": (columns["reward_model"][index] or {}).get("ground_truth"),
            "score": scores[index],
            "reward": {name: values[index] for name, values in reward.extra_info.items()},
            "prompt_ids": tensors["prompts"][index][prompt_mask[index]].tolist(),
        }
        valid = response_mask[index]
        row |= {name: None if of is None else of[index][valid].tolist() for name, of in per_token.items()}
        rows.append(row)
    return rows


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """What people read on the console."""
    return {name: row[name] for name in ("uid", "prompt", "response", "ground_truth", "score") if name in row}
