"""Prompts of a split as token ids, with everything that scoring and agent loops need next to them."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from verl.utils.config import ConfigError
from verl.utils.dataset.dataloader import collate_fn
from verl.utils.dataset.files import KEYS, Rows
from verl.utils.dataset.schema import RowError, is_empty_truth, sample
from verl.utils.dataset.settings import DataSettings
from verl.utils.user_code import load_from_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RLHFDataset", "build_dataset", "collate_fn"]

logger = logging.getLogger(__name__)

TOKENIZE_ROWS = 1024
MARK = "verl-shows-this"
ShownTools = Callable[[str | None], Sequence[Any]]
"""Schemas of the tools that the agent of that name shows in its prompts; None is the agent of samples that name none.

Raises ConfigError for a name that no agent has."""


@dataclass
class DataSource:
    """The samples of one data source."""

    count: int = 0
    without_truth: int = 0
    first: str = ""
    """Where its first sample is, or the first without a ground truth."""


@dataclass
class Partners:
    """The samples of one agent that name an interaction."""

    count: int = 0
    first: str = ""
    """Where the first of them is."""


class RLHFDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of parquet and JSON Lines files; a map-style data set. Built on the driver, which checks every row and
    tokenizes every prompt up front.

    An item is the row (`data_source`, `reward_model`, `ability`, `agent_name`, ...) with the prompt column replaced by
    `raw_prompt` (chat messages), plus `prompt_ids` (list of ints, not padded), `extra_info` (a dict, perhaps empty) and
    `index` (`extra_info.index`, else the row number).

    Raises ConfigError for a missing column, a row that is no sample (`schema.sample`), a tokenizer whose chat template
    is missing, raises or leaves messages out, no prompt left, and, with `truncation=error`, prompts longer than
    `max_prompt_length`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataSettings,
        split: str = "train",
        *,
        shown_tools: ShownTools | None = None,
    ) -> None:
        """`shown_tools` is asked once per agent; without it no agent shows tools."""
        self._config = config
        self._split = split
        self._files = ", ".join(str(path) for path in files)
        self._shown_tools = shown_tools
        limit = config.train_max_samples if split == "train" else config.val_max_samples
        self._table = Rows(files, (config.prompt_key, config.reward_fn_key, "reward_model"), limit)
        self.sources: dict[str, DataSource] = defaultdict(DataSource)
        self.partners: dict[str | None, Partners] = defaultdict(Partners)
        """Of every agent; None is that of samples that name none."""
        self._prompts: list[list[dict[str, Any]]] = []
        self._agents: list[str | None] = []
        self._check_rows()
        self._ids = self._tokenize(tokenizer)
        self._rows = self._fit(range(len(self._ids)))
        if not self._rows:
            raise ConfigError(f"no {split} samples are left of {len(self._table)} in {self._files}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = self._rows[position]
        [read] = self._table.read(row, row + 1)
        item = sample(read, self._config)
        del item[self._config.prompt_key]
        index = item["extra_info"].get("index")
        return {
            **item,
            "raw_prompt": self._prompts[row],
            "prompt_ids": self._ids[row],
            "index": row if index is None else index,
        }

    def _check_rows(self) -> None:
        """Read every row once: prompts and agents are kept, sources and partners counted."""
        wrong: list[tuple[int, RowError]] = []
        for start in range(0, len(self._table), TOKENIZE_ROWS):
            for row, read in enumerate(self._table.read(start, start + TOKENIZE_ROWS), start):
                try:
                    item = sample(read, self._config)
                except RowError as exc:
                    wrong.append((row, exc))
                    continue
                self._prompts.append(item[self._config.prompt_key])
                self._agents.append(item.get("agent_name") or None)
                self._count(item, row)
        if wrong:
            row, error = wrong[0]
            more = f" ({len(wrong)} of {len(self._table)} rows are no samples)" if len(wrong) > 1 else ""
            raise ConfigError(f"{self._place(row)}: {error}{more}") from error

    def _count(self, item: dict[str, Any], row: int) -> None:
        source = self.sources[item[self._config.reward_fn_key]]
        empty = is_empty_truth(item["reward_model"].get("ground_truth"))
        if not source.count or (empty and not source.without_truth):
            source.first = self._place(row)
        source.count += 1
        source.without_truth += empty
        partners = self.partners[item.get("agent_name") or None]
        if item.get("interaction_kwargs") or item["extra_info"].get("interaction_kwargs"):
            partners.first = partners.first or self._place(row)
            partners.count += 1

    def _place(self, row: int) -> str:
        return f"{KEYS[self._split]}: {self._table.place(row)}"

    def _tokenize(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template: set actor_rollout_ref.model.custom_chat_template to one (Jinja)"
            )
        self._require_shown_roles(tokenizer)
        rows_of: dict[str | None, list[int]] = defaultdict(list)
        for row, agent in enumerate(self._agents):
            rows_of[agent].append(row)
        ids: list[list[int]] = [[]] * len(self._prompts)
        for agent, rows in rows_of.items():
            tools = self._tools(agent, rows[0])
            for start in range(0, len(rows), TOKENIZE_ROWS):
                chosen = rows[start : start + TOKENIZE_ROWS]
                for row, found in zip(chosen, self._token_ids(tokenizer, chosen, tools), strict=True):
                    ids[row] = found
        return ids

    def _tools(self, agent: str | None, row: int) -> list[Any]:
        if self._shown_tools is None:
            return []
        try:
            return list(self._shown_tools(agent))
        except ConfigError as exc:
            raise ConfigError(f"{self._place(row)}: {exc}" if agent else str(exc)) from exc

    def _token_ids(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int], tools: Sequence[Any]
    ) -> list[list[int]]:
        """Of the prompts in `rows` as agents send them. Raises ConfigError for one that the template cannot write."""
        try:
            return cast(
                "list[list[int]]",
                tokenizer.apply_chat_template(
                    [self._prompts[row] for row in rows],
                    tools=list(tools) or None,
                    add_generation_prompt=True,
                    return_dict=False,
                    **self._config.apply_chat_template_kwargs,
                ),
            )
        except Exception as exc:
            if len(rows) == 1:
                raise ConfigError(
                    f"{self._place(rows[0])}: the chat template cannot write this prompt: {type(exc).__name__}: {exc}"
                ) from exc
        return [self._token_ids(tokenizer, [row], tools)[0] for row in rows]

    def _require_shown_roles(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError if the chat template leaves out messages of a role, as some do with unknown ones."""
        first: dict[str, int] = {}
        for row, prompt in enumerate(self._prompts):
            for message in prompt:
                if isinstance(message.get("content"), str):
                    first.setdefault(message["role"], row)
        for role, row in first.items():
            message, other = {"role": role, "content": MARK}, {"role": "user", "content": "x"}
            written = [self._written(tokenizer, each) for each in ([other, message], [message, other])]
            known = [text for text in written if text is not None]
            if known and not any(MARK in text for text in known):
                raise ConfigError(
                    f"{self._place(row)}: the tokenizer's chat template does not show messages of role {role!r}; "
                    "use a role that it knows, or set actor_rollout_ref.model.custom_chat_template"
                )

    def _written(self, tokenizer: Any, conversation: list[dict[str, str]]) -> str | None:
        """As the template writes it; None where it does not take such a conversation."""
        try:
            written: str = tokenizer.apply_chat_template(
                conversation, tokenize=False, **self._config.apply_chat_template_kwargs
            )
        except Exception:  # noqa: BLE001 - a template raises what it likes; prompts are tried one by one
            return None
        return written

    def _fit(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows that stay, after what is too long was dropped or cut as configured."""
        limit = self._config.max_prompt_length
        overlong = [row for row in rows if len(self._ids[row]) > limit]
        if not overlong:
            return rows
        longest = max(len(self._ids[row]) for row in overlong)
        found = (
            f"{len(overlong)} of {len(rows)} {self._split} prompts are longer than data.max_prompt_length={limit} "
            f"tokens (longest {longest}, first in {self._table.place(overlong[0])})"
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
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    config: DataSettings,
    split: str = "train",
    *,
    shown_tools: ShownTools | None = None,
) -> torch.utils.data.Dataset[dict[str, Any]]:
    """`RLHFDataset`, or the class that `data.custom_cls` names, with the same arguments and items.

    A class of the user's own gets `shown_tools` if it takes it.
    """
    if config.custom_cls.path is None:
        if config.custom_cls.name is not None:
            raise ConfigError(f"data.custom_cls.name={config.custom_cls.name} is set: set data.custom_cls.path, too")
        return RLHFDataset(files, tokenizer, config, split=split, shown_tools=shown_tools)
    if config.custom_cls.name is None:
        raise ConfigError("data.custom_cls.path is set: set data.custom_cls.name to the class in it")
    cls = load_from_file(config.custom_cls.path, config.custom_cls.name, key="data.custom_cls")
    taken = {"shown_tools": shown_tools} if "shown_tools" in inspect.signature(cls).parameters else {}
    dataset = cls(files, tokenizer, config, split=split, **taken)
    if not isinstance(dataset, torch.utils.data.Dataset):
        raise ConfigError(f"data.custom_cls.name={config.custom_cls.name!r} is no subclass of torch.utils.data.Dataset")
    if not isinstance(dataset, RLHFDataset):
        _check_first_item(dataset, config, split)
    return dataset


def _check_first_item(dataset: torch.utils.data.Dataset[dict[str, Any]], config: DataSettings, split: str) -> None:
    """Of a class that does not check its rows itself; to make all its items may take long."""
    if not len(cast("Sized", dataset)):
        raise ConfigError(f"data.custom_cls.name={config.custom_cls.name!r} has no {split} samples")
    item = dataset[0]
    try:
        sample({**item, config.prompt_key: item.get("raw_prompt")}, config)
    except RowError as exc:
        raise ConfigError(f"data.custom_cls.name={config.custom_cls.name!r}: item 0 of {split}: {exc}") from exc
