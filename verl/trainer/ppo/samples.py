"""Samples for people to read: JSONL files, and a few on the console."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.checkpoint_engine.support import records
from verl.protocol import DataProto, tensors_of
from verl.trainer.config.record import SECRET
from verl.utils.console import boxed
from verl.utils.tracking_services import Sample
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
SHUFFLED_BY = 42
"""verl's seed for the choice of samples."""
SHORTEST_SECRET = 6
"""Characters; shorter values could occur in any text."""


class SampleWriter:
    """Writes `<directory>/<step>.jsonl`, one line per sample; does nothing without a directory.

    `response_ids`, `response_mask` (1: the policy generated it), `versions` (of the weights; -1: inserted) and
    `log_probs` (the engine's; null where not requested) have one entry per token of the response, and with
    `rollout.kv_across_versions` so have `kv_versions` (the oldest that the token attends to). `replicas` are
    `[name, start, stop]`: which engine generated tokens `[start, stop)`. `reward` is the reward function's result.

    Replaces lines that an earlier run, killed after its last checkpoint, wrote for the same step.
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
        """Let the next writes for steps after `step` replace their files."""
        self._begun = {begun for begun in self._begun if begun <= step}

    @staticmethod
    def show(what: str, batch: DataProto, reward: RewardOutput, count: int) -> None:
        """Print the first `count` samples in boxes on the console, under the title `what`."""
        for row in _rows(batch[:count], reward):
            title = f"{what}, {row.get('data_source', 'sample')}: score {row['score']:.3g}"
            logger.info("%s", boxed(title, {name: without_secrets(text) for name, text in _told(row).items()}))


def samples_of(batch: DataProto, reward: RewardOutput) -> list[Sample]:
    """What people read of each sample of `batch`."""
    prompts = batch.non_tensor_batch.get("raw_prompt", [None] * len(batch))
    scores = reward.reward_tensor.sum(-1).tolist()
    each = zip(prompts, reward.responses, scores, strict=True)
    return [
        Sample(without_secrets(_asked(prompt)), without_secrets(str(answer)), score) for prompt, answer, score in each
    ]


def chosen(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Those that verl shows of a validation: the same prompts each time, of all data sources."""
    ordered = sorted(samples, key=lambda sample: sample.prompt)
    order = np.arange(len(ordered))
    np.random.RandomState(SHUFFLED_BY).shuffle(order)
    return [ordered[index] for index in order[:count]]


def without_secrets(text: str) -> str:
    """`text` without the values of environment variables whose names mean secrets: tools may have printed them."""
    secrets = [value for name, value in os.environ.items() if SECRET.fullmatch(name) and len(value) >= SHORTEST_SECRET]
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def _rows(batch: DataProto, reward: RewardOutput) -> list[dict[str, Any]]:
    """All there is to say about each sample: what was asked, who answered what with which weights, its reward."""
    columns, tensors = batch.non_tensor_batch, tensors_of(batch)
    width = tensors["responses"].shape[1]
    prompt_mask, response_mask = tensors["attention_mask"].bool().split((tensors["prompts"].shape[1], width), dim=1)
    scores = reward.reward_tensor.sum(-1).tolist()
    truths = columns.get("reward_model", [None] * len(batch))  # datasets of the user's own may have none
    per_token = {
        name: tensors.get(key)
        for name, key in (
            ("response_ids", "responses"),
            ("response_mask", "response_mask"),
            ("versions", "rollout_versions"),
            ("log_probs", "rollout_log_probs"),
            ("kv_versions", "rollout_kv_versions"),
        )
        if name != "kv_versions" or key in tensors
    }
    rows = []
    for index in range(len(batch)):
        row: dict[str, Any] = {name: columns[key][index] for name, key in _COLUMNS.items() if key in columns}
        row |= {
            "response": reward.responses[index],
            "ground_truth": (truths[index] or {}).get("ground_truth"),
            "score": scores[index],
            "reward": {name: values[index] for name, values in reward.extra_info.items()},
            "prompt_ids": tensors["prompts"][index][prompt_mask[index]].tolist(),
        }
        valid = response_mask[index]
        row |= {name: None if of is None else of[index][valid].tolist() for name, of in per_token.items()}
        rows.append(row)
    return rows


def _told(row: dict[str, Any]) -> dict[str, str]:
    """What people read on the console."""
    asked = row.get("prompt")
    told = {
        "prompt": None if asked is None else _asked(asked),
        "answer": row["response"],
        "truth": row["ground_truth"],
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def _asked(prompt: Any) -> str:
    return "\n".join(map(_said, prompt)) if isinstance(prompt, (list, tuple, np.ndarray)) else str(prompt)


def _said(message: Any) -> str:
    """A message in a line; of content in parts those that are text, and the kinds of the others. What a dataset of the
    user's own has in its place is shown as it is."""
    if not isinstance(message, dict) or "role" not in message:
        return str(message)
    content = message.get("content")
    if isinstance(content, (list, tuple, np.ndarray)):
        parts = (part if isinstance(part, dict) else {"text": part} for part in content)
        content = " ".join(str(part["text"]) if "text" in part else f"<{part.get('type')}>" for part in parts)
    return f"{message['role']}: {content or ''}"
