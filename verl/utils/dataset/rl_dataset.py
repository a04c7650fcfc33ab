"""Prompts of a split as token ids, with everything that scoring and agent loops need next to them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from verl.utils.config import ConfigError
from verl.utils.dataset.files import read_table
from verl.utils.dataset.settings import DataSettings
from verl.utils.user_code import load_from_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOKENIZE_ROWS = 1024


class RLHFDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Parquet rows; a map-style data set. Built on the driver, which tokenizes every prompt up front.

    An item is the row (`data_source`, `reward_model`, `ability`, `agent_name`, ...) with the prompt column replaced by
    `raw_prompt` (chat messages), plus `prompt_ids` (list of ints, not padded), `extra_info` (a dict, perhaps empty) and
    `index` (`extra_info.index`, else the row number).

    Raises ConfigError for a missing column, a prompt that is not a list of chat messages, a tokenizer without chat
    template, no prompt left, and, with `truncation=error`, prompts longer than `max_prompt_length`.
    """

    def __init__(
        self, files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, config: DataSettings, split: str = "train"
    ) -> None:
        self._config = config
        self._split = split
        self._files = ", ".join(str(path) for path in files)
        limit = config.train_max_samples if split == "train" else config.val_max_samples
        table = read_table(files, (config.prompt_key, config.reward_fn_key, "reward_model"))
        self._table = table.slice(0, limit) if limit >= 0 else table
        self._prompts: list[list[dict[str, Any]]] = [
            self._messages(row, prompt) for row, prompt in enumerate(self._table[config.prompt_key].to_pylist())
        ]
        self._ids = self._tokenize(tokenizer)
        self._rows = self._fit(range(len(self._ids)))
        if not self._rows:
            raise ConfigError(f"no {split} samples are left of {self._table.num_rows} in {self._files}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = self._rows[position]
        [item] = self._table.slice(row, 1).to_pylist()
        extra_info = item.get("extra_info") or {}
        del item[self._config.prompt_key]
        return {
            **item,
            "raw_prompt": self._prompts[row],
            "prompt_ids": self._ids[row],
            "extra_info": extra_info,
            "index": extra_info.get("index", row),
        }

    def _messages(self, row: int, prompt: Any) -> list[dict[str, Any]]:
        if not isinstance(prompt, list) or not prompt or not all(isinstance(each, dict) for each in prompt):
            raise ConfigError(
                f"column {self._config.prompt_key!r} of row {row} in {self._files} is no list of chat messages "
                f"({{role, content}}): {str(prompt)[:80]!r}"
            )
        # Parquet gives every message of a column the same fields; chat templates ask whether one is defined.
        return [{key: value for key, value in message.items() if value is not None} for message in prompt]

    def _tokenize(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template: set actor_rollout_ref.model.custom_chat_template to one (Jinja)"
            )
        ids: list[list[int]] = []
        for start in range(0, len(self._prompts), TOKENIZE_ROWS):
            conversations = self._prompts[start : start + TOKENIZE_ROWS]
            ids += cast(
                "list[list[int]]",
                tokenizer.apply_chat_template(
                    conversations,
                    add_generation_prompt=True,
                    return_dict=False,
                    **self._config.apply_chat_template_kwargs,
                ),
            )
        return ids

    def _fit(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows that stay, after what is too long was dropped or cut as configured."""
        limit = self._config.max_prompt_length
        overlong = [row for row in rows if len(self._ids[row]) > limit]
        if not overlong:
            return rows
        longest = max(len(self._ids[row]) for row in overlong)
        found = (
            f"{len(overlong)} of {len(rows)} {self._split} prompts are longer than data.max_prompt_length={limit} "
            f"tokens (longest {longest}, first in row {overlong[0]})"
        )
        if self._config.filter_overlong_prompts:
            logger.warning("%s; they are dropped", found)
            dropped = set(overlong)
            return [row for row in rows if row not in dropped]
        if self._config.truncation == "error":
            raise ConfigError(
                f"{found}. Raise the limit, or set data.filter_overlong_prompts=true, or "
                "data.truncation=left|right|middle"
            )
        logger.warning("%s; they are cut (data.truncation=%s)", found, self._config.truncation)
        for row in overlong:
            self._ids[row] = truncate(self._ids[row], limit, self._config.truncation)
        return rows


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """`limit` of more than `limit` ids: without the left, the right or the middle part."""
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def build_dataset(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, config: DataSettings, split: str = "train"
) -> torch.utils.data.Dataset[dict[str, Any]]:
    """`RLHFDataset`, or the class that `data.custom_cls` names, with the same arguments and items."""
    if config.custom_cls.path is None:
        if config.custom_cls.name is not None:
            raise ConfigError(f"data.custom_cls.name={config.custom_cls.name} is set: set data.custom_cls.path, too")
        return RLHFDataset(files, tokenizer, config, split=split)
    if config.custom_cls.name is None:
        raise ConfigError("data.custom_cls.path is set: set data.custom_cls.name to the class in it")
    cls = load_from_file(config.custom_cls.path, config.custom_cls.name, key="data.custom_cls")
    dataset = cls(files, tokenizer, config, split=split)
    if not isinstance(dataset, torch.utils.data.Dataset):
        raise ConfigError(f"data.custom_cls.name={config.custom_cls.name!r} is no subclass of torch.utils.data.Dataset")
    return dataset
