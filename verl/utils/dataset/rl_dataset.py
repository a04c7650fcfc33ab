"""Prompts of a split as token ids, with the columns that scoring and agent loops need."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from verl.utils.config import ConfigError
from verl.utils.dataset.dataloader import collate_fn
from verl.utils.dataset.files import KEYS, Rows
from verl.utils.dataset.schema import NOTHING, RowError, is_empty_truth, sample
from verl.utils.dataset.seen import NAMES, Columns, in_files, videos_in_files, with_media
from verl.utils.dataset.settings import DataSettings
from verl.utils.pictures import (
    MULTI_MODAL_DATA,
    Medium,
    PictureError,
    PictureProcessor,
    Video,
    by_kind,
    is_turned,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RLHFDataset", "collate_fn"]

logger = logging.getLogger(__name__)

TOKENIZE_ROWS = 1024
MARK = "verl-shows-this"
KWARGS = ("tools_kwargs", "interaction_kwargs")
ShownTools = Callable[[str | None], Sequence[Any]]
"""Returns the schemas of the tools in an agent's prompts; None means the agent of samples without a name.

Raises ConfigError for an unknown name."""


@dataclass
class DataSource:
    """The samples of one data source."""

    count: int = 0
    without_truth: int = 0
    first: str = ""
    """The place of its first sample, or of the first without a ground truth."""
    agents: set[str | None] = field(default_factory=set)
    """That its samples name; None if one names none."""


@dataclass
class Partners:
    """The samples of one agent that name an interaction."""

    count: int = 0
    first: str = ""
    """The place of the first of them."""


class RLHFDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of parquet and JSON Lines files; a map-style data set. Built on the driver, which checks every row and
    tokenizes every prompt up front.

    An item is the row (`data_source`, `reward_model`, `ability`, `agent_name`, ...) with the prompt column replaced by
    `raw_prompt` (chat messages), plus `prompt_ids` (list of ints, not padded), `extra_info` (a dict, perhaps empty),
    `index` (`extra_info.index`, else the row number), and `tools_kwargs` and `interaction_kwargs` (columns, or out of
    `extra_info`; perhaps empty).

    As in verl, a subclass may override `_read_files_and_tokenize` (it sets `dataframe`, a `datasets.Dataset`),
    `maybe_filter_out_long_prompts`, `_build_messages` and `__getitem__`.

    Raises ConfigError for a missing column, a row that is no sample (`schema.sample`), a tokenizer whose chat template
    is missing, raises or leaves messages out, a picture that cannot be used (with `filter_overlong_prompts` its sample
    is dropped, as in verl), different numbers of marks and pictures, no prompt left, and, with `truncation=error`,
    prompts longer than `max_prompt_length`.
    """

    _split = "train"
    _shown_tools: ShownTools | None = None

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataSettings,
        processor: PictureProcessor | None = None,
        max_samples: int | None = None,
        *,
        split: str | None = None,
        shown_tools: ShownTools | None = None,
    ) -> None:
        """`max_samples` rows, with `data.shuffle` drawn by `data.seed`, else the first; -1: all; null: as `data` says
        for this split. `shown_tools` is asked once per agent; without it no agent shows tools. `processor`: of a model
        that sees; None: pictures are refused."""
        self._split = split or self._split
        self._shown_tools = shown_tools or self._shown_tools
        if max_samples is None:
            max_samples = config.train_max_samples if self._split == "train" else config.val_max_samples
        given = [data_files] if isinstance(data_files, (str, Path)) else data_files
        self.data_files = [str(path) for path in given]
        self.original_data_files = list(self.data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.max_samples = max_samples
        self.prompt_key = config.prompt_key
        self.max_prompt_length = config.max_prompt_length
        self.truncation = config.truncation
        self.filter_overlong_prompts = config.filter_overlong_prompts
        self.apply_chat_template_kwargs = config.apply_chat_template_kwargs
        self.return_raw_chat = config.return_raw_chat
        self.shuffle = config.shuffle
        self.seed = config.seed
        self.dataframe: Any = None
        self._read_files_and_tokenize()
        self._table = self._drawn()
        self.sources: dict[str, DataSource] = defaultdict(DataSource)
        self.partners: dict[str | None, Partners] = defaultdict(Partners)
        """Of every agent; None is that of samples that name none."""
        self._prompts: list[list[dict[str, Any]]] = []
        self._pictures: list[list[Medium]] = []
        self._texts: list[list[str]] = []
        """Of each row: what its pictures become in the prompt."""
        self.pictured: dict[str | None, str] = {}
        """By agent: where the first of its samples with pictures is."""
        self.filmed = ""
        """Where the first sample with a video is."""
        self._unusable: dict[int, str] = {}
        """By row: what is wrong with a picture of it, where such rows are dropped."""
        self._turned: list[int] = []
        """Rows with pictures that their files ask to turn, once for each."""
        self._media = Columns.of(config, processor)
        self._unseen = NOTHING if self.processor is None else {"video": self.processor.why_no_videos}
        self._agents: list[str | None] = []
        self._check_rows()
        self._warn_of_turned()
        media = [medium for each in self._pictures for medium in each]
        self._kinds = set(by_kind(media)) if media else set()
        """Keys of `MULTI_MODAL_DATA` in every item."""
        self._ids = self._tokenize(tokenizer)
        self._rows = self._fit(self._usable())
        if not self._rows:
            raise ConfigError(
                f"no {self._split} samples are left of {len(self._table)} in {', '.join(self.data_files)}"
            )
        if len(self._rows) < len(self._table):
            self.dataframe = self._table.select(self._rows)

    def read_for(self, split: str, shown_tools: ShownTools | None) -> None:
        """Set a split's arguments that a subclass's constructor does not accept. Called before the constructor."""
        self._split, self._shown_tools = split, shown_tools

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = self._rows[position]
        item = self._sample(self._table[row])
        del item[self.prompt_key]
        if self._kinds:
            for key in (self.config.image_key, self.config.video_key):
                item.pop(key, None)
            item[MULTI_MODAL_DATA] = by_kind(self._pictures[row], self._kinds)
        index = item["extra_info"].get("index")
        return {
            **item,
            "raw_prompt": self._prompts[row],
            "prompt_ids": self._ids[row],
            "index": row if index is None else index,
            **{name: item.get(name) or item["extra_info"].get(name) or {} for name in KWARGS},
        }

    def _read_files_and_tokenize(self) -> None:
        """Set `dataframe` to the rows of `data_files`: something with a length, items that are dicts, and `select`."""
        columns = (self.config.prompt_key, self.config.reward_fn_key, "reward_model")
        lighten = {self.config.image_key: in_files, self.config.video_key: videos_in_files}
        lighten = lighten if self.processor is not None else {}
        rows = Rows([Path(path) for path in self.data_files], columns, lighten, partial(remedy_for, columns[0]))
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """verl's name: the rows to use. Too long prompts are dropped later, when they are tokenized."""
        return dataframe

    def _build_messages(self, example: dict[str, Any], key: str) -> Any:
        """The chat messages of a row, of which `key` is the prompt's column."""
        return example.get(key)

    def _drawn(self) -> Rows | _OwnRows:
        """The rows of `dataframe`, or `max_samples` of them."""
        if not all(hasattr(self.dataframe, name) for name in ("__len__", "__getitem__", "select")):
            kind = f"{type(self.dataframe).__module__}.{type(self.dataframe).__name__}"
            raise ConfigError(
                f"{type(self).__name__}._read_files_and_tokenize sets dataframe to a {kind}, no datasets.Dataset"
            )
        total = len(self.dataframe)
        if 0 <= self.max_samples < total:
            drawn: Any = np.random.default_rng(self.seed).choice(total, size=self.max_samples, replace=False)
            self.dataframe = self.dataframe.select(drawn.tolist() if self.shuffle else range(self.max_samples))
        return self.dataframe if isinstance(self.dataframe, Rows) else _OwnRows(self.dataframe, type(self).__name__)

    def _sample(self, row: dict[str, Any]) -> dict[str, Any]:
        messages = self._build_messages({**row}, self.prompt_key)
        return sample({**row, self.prompt_key: messages}, self.config, unseen=self._unseen)

    def _check_rows(self) -> None:
        """Read every row once: prompts and agents are kept, sources and partners counted."""
        wrong: list[tuple[int, RowError]] = []
        for start in range(0, len(self._table), TOKENIZE_ROWS):
            for row, read in enumerate(self._table.read(start, start + TOKENIZE_ROWS), start):
                try:
                    item = self._sample(read)
                    self._look(item, row)
                except RowError as exc:
                    wrong.append((row, exc))
                    continue
                self._agents.append(item.get("agent_name") or None)
                self._count(item, row)
        if wrong:
            row, error = wrong[0]
            more = f" ({len(wrong)} of {len(self._table)} rows are no samples)" if len(wrong) > 1 else ""
            raise ConfigError(f"{self._place(row)}: {error}{more}") from error

    def _look(self, item: dict[str, Any], row: int) -> None:
        """Keep the prompt of a row, and find and open its pictures. Raises RowError."""
        prompt = item[self.prompt_key]
        pictures: list[Medium] = []
        texts: list[str] = []
        if self.processor is not None:
            prompt, pictures = with_media(prompt, item, self._media)
            counts: dict[str, int] = defaultdict(int)
            for medium in pictures:
                name = NAMES["video" if isinstance(medium, Video) else "image"]
                try:
                    texts.append(self._text(medium, row))
                except PictureError as exc:
                    if not self.filter_overlong_prompts:
                        raise RowError(f"{name} {counts[name]} {exc}") from exc
                    self._unusable[row] = f"{name} {counts[name]} {exc}"
                    texts.append(self.processor.mark(medium))
                counts[name] += 1
        if pictures:
            self.pictured.setdefault(item.get("agent_name") or None, self._place(row))
        if not self.filmed and any(isinstance(medium, Video) for medium in pictures):
            self.filmed = self._place(row)
        self._prompts.append(prompt)
        self._pictures.append(pictures)
        self._texts.append(texts)

    def _text(self, medium: Medium, row: int) -> str:
        """What it becomes in the prompt. Raises PictureError for one that cannot be used."""
        assert self.processor is not None
        if isinstance(medium, Video):
            return self.processor.text(medium)
        image = medium.open()
        text = self.processor.text_of(image, medium.limits)
        if is_turned(image):
            self._turned.append(row)
        return text

    def _warn_of_turned(self) -> None:
        if self._turned:
            logger.warning(
                "%d pictures ask to be turned or mirrored by their EXIF orientation (first in %s): they are taken as "
                "they are stored, as verl does; vLLM's own server and transformers' load_image turn them",
                len(self._turned),
                self._table.place(self._turned[0]),
            )

    def _count(self, item: dict[str, Any], row: int) -> None:
        source = self.sources[item[self.config.reward_fn_key]]
        empty = is_empty_truth(item["reward_model"].get("ground_truth"))
        if not source.count or (empty and not source.without_truth):
            source.first = self._place(row)
        source.count += 1
        source.without_truth += empty
        agent = item.get("agent_name") or None
        source.agents.add(agent)
        partners = self.partners[agent]
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
        self._require_shown_parts(tokenizer)
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
            written: Any = tokenizer.apply_chat_template(
                [self._prompts[row] for row in rows],
                tools=list(tools) or None,
                add_generation_prompt=True,
                return_dict=False,
                tokenize=self.processor is None,
                **self.config.apply_chat_template_kwargs,
            )
        except Exception as exc:
            if len(rows) == 1:
                raise ConfigError(
                    f"{self._place(rows[0])}: the chat template cannot write this prompt: {type(exc).__name__}: {exc}"
                ) from exc
            return [self._token_ids(tokenizer, [row], tools)[0] for row in rows]
        if self.processor is None:
            return cast("list[list[int]]", written)
        return [self._expanded(self.processor, tokenizer, row, text) for row, text in zip(rows, written, strict=True)]

    def _expanded(
        self, processor: PictureProcessor, tokenizer: PreTrainedTokenizerBase, row: int, prompt: str
    ) -> list[int]:
        """The token ids of a prompt, with what its pictures become."""
        try:
            text = processor.expanded(prompt, self._texts[row])
            ids = cast("list[int]", tokenizer.encode(text, add_special_tokens=False))
            processor.require(ids, self._texts[row])
        except PictureError as exc:
            raise ConfigError(f"{self._place(row)}: {exc}") from exc
        return ids

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

    def _require_shown_parts(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError if the chat template does not write a text in a list as it writes the text, or leaves
        out the second of two: some write the list's Python code, some its first part alone."""
        first: dict[str, int] = {}
        for row, prompt in enumerate(self._prompts):
            for message in prompt:
                if isinstance(message.get("content"), list) and any(
                    part["type"] == "text" for part in message["content"]
                ):
                    first.setdefault(message["role"], row)
        for role, row in first.items():
            before = [] if role in ("user", "system") else [{"role": "user", "content": "x"}]
            one, two = ({"type": "text", "text": text} for text in (MARK, MARK.upper()))
            alone, listed, both = (
                self._written(tokenizer, [*before, {"role": role, "content": each}])
                for each in (MARK, [one], [one, two])
            )
            if listed != alone or not all(part["text"] in (both or "") for part in (one, two)):
                raise ConfigError(
                    f"{self._place(row)}: content of role {role!r} is a list of parts, which the tokenizer's chat "
                    "template does not write as text: make it one text"
                )

    def _written(self, tokenizer: Any, conversation: list[dict[str, Any]]) -> str | None:
        """As the template writes it; None where it does not take such a conversation."""
        try:
            written: str = tokenizer.apply_chat_template(
                conversation, tokenize=False, **self.config.apply_chat_template_kwargs
            )
        except Exception:  # noqa: BLE001 - a template raises what it likes; prompts are tried one by one
            return None
        return written

    def _usable(self) -> Sequence[int]:
        rows = range(len(self._ids))
        if not self._unusable:
            return rows
        first, why = next(iter(self._unusable.items()))
        logger.warning(
            "%d of %d %s samples have pictures that cannot be used (first in %s: %s); they are dropped",
            len(self._unusable),
            len(rows),
            self._split,
            self._table.place(first),
            why,
        )
        return [row for row in rows if row not in self._unusable]

    def _fit(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows that stay, after what is too long was dropped or cut as configured."""
        limit = self.config.max_prompt_length
        overlong = [row for row in rows if len(self._ids[row]) > limit]
        if not overlong:
            return rows
        longest = max(len(self._ids[row]) for row in overlong)
        found = (
            f"{len(overlong)} of {len(rows)} {self._split} prompts are longer than data.max_prompt_length={limit} "
            f"tokens (longest {longest}, first in {self._table.place(overlong[0])})"
        )
        if self.config.filter_overlong_prompts:
            logger.warning("%s; they are dropped", found)
            dropped = set(overlong)
            return [row for row in rows if row not in dropped]
        if self.config.truncation == "error":
            raise ConfigError(
                f"{found}. Raise the limit, or set data.filter_overlong_prompts=true, or "
                "data.truncation=left|right|middle"
            )
        if cut := [row for row in overlong if self._pictures[row]]:
            raise ConfigError(
                f"{found}, and {len(cut)} of them have pictures, which cannot be cut (first in "
                f"{self._table.place(cut[0])}). Raise the limit, or set data.filter_overlong_prompts=true"
            )
        logger.warning("%s; they are cut (data.truncation=%s)", found, self.config.truncation)
        for row in overlong:
            self._ids[row] = truncate(self._ids[row], limit, self.config.truncation)
        return rows


class _OwnRows:
    """What a class of the user's own has read."""

    def __init__(self, rows: Any, owner: str) -> None:
        self._rows = rows
        self._owner = owner

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self._rows[row])

    def select(self, rows: Sequence[int]) -> Any:
        return self._rows.select(rows)

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        return [self[row] for row in range(start, min(stop, len(self)))]

    def place(self, row: int) -> str:
        return f"row {row} that {self._owner} has read"


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """The ids cut to `limit`, without the left, the right or the middle part."""
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def remedy_for(prompt_key: str, path: Path, row: dict[str, Any]) -> str:
    """Advice for a file whose first row lacks a column; empty if the row has the prompt."""
    if prompt_key in row:
        return ""
    for question, solution, name in (("question", "answer", "gsm8k"), ("problem", "solution", "math")):
        if {question, solution} <= row.keys():
            return f" Make samples of it: python -m verl.utils.data prepare {name} --from {path} --to {name}.parquet"
    chats = [name for name, value in row.items() if isinstance(value, list) and value and "role" in value[0]]
    return f" If its messages are the prompts: data.prompt_key={chats[0]}" if chats else ""
