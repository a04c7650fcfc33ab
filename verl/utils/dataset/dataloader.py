"""Batches of prompts, in a reproducible order that continues after a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import xxhash

from verl.utils.config import ConfigError
from verl.utils.dataset.settings import DataSettings

if TYPE_CHECKING:
    from torch.utils.data import Dataset

logger = logging.getLogger(__name__)

CHUNK_NBYTES = 1 << 24


class PromptLoader:
    """Batches for `DataProto.from_dict(non_tensors=batch)`, epoch after epoch: one per `for` loop over it.

    `load_state_dict()` with a `state_dict()` continues with the batches that would have come next; after the last one
    of an epoch, with the next epoch's. A loop that is left early starts its epoch again. The order depends on
    `data.seed` alone, and the position is a number of samples, so loader processes and batch sizes may change.
    """

    def __init__(
        self,
        dataset: Dataset[dict[str, Any]],
        config: DataSettings,
        batch_size: int,
        shuffle: bool,
        drop_last: bool = False,
        source: str = "",
    ) -> None:
        """`source` is the fingerprint of the files of `dataset`; empty if unknown."""
        self.dataset = dataset
        self.source = source
        self._config = config
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._epoch = 0
        self._position = 0
        """Samples of the epoch that have been given out."""
        self._first = 0
        """Samples of the epoch that an iterator leaves out: they were given out before this loader was made."""

    def __len__(self) -> int:
        """The number of batches of a whole epoch."""
        whole, rest = divmod(self._rows, self._batch_size)
        return whole + bool(rest and not self._drop_last)

    @property
    def num_prompts(self) -> int:
        """The number of rows of an epoch, including those of an incomplete last batch."""
        return self._rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch

        first, self._first = self._first, 0
        self._position = first
        batches = self._batches(self._order(self._epoch)[first:])
        loader = torch.utils.data.DataLoader(
            self.dataset,
            batch_sampler=batches,
            num_workers=self._config.dataloader_num_workers,
            collate_fn=collate_fn,
            # Seeds worker processes; else the global generator is drawn from.
            generator=torch.Generator().manual_seed(self._config.seed),
        )
        epoch = self._epoch
        for samples, batch in zip(batches, loader, strict=True):
            self._epoch, self._position = epoch, self._position + len(samples)
            if samples is batches[-1]:
                self._epoch, self._position = epoch + 1, 0
            yield batch
        if not batches:
            self._epoch, self._position = epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "data": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError as `check` does; logs the start of a requested new epoch."""
        if reason := self.difference(state):
            self.check(state)
            logger.warning("%s: a new epoch begins", reason)
            self._epoch, self._first = state["epoch"] + 1, 0
        else:
            self._epoch, self._first = state["epoch"], state["position"]
        self._position = self._first

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError unless this loader can continue from `state` without repeating or omitting samples."""
        reason = self.difference(state)
        if reason and self._config.resume_other_data != "new_epoch":
            raise ConfigError(
                f"{reason}: the next samples are unknown. Continue with the same data, or set "
                "data.resume_other_data=new_epoch to begin an epoch with these, or trainer.resume_mode=disable"
            )

    def difference(self, state: Mapping[str, Any]) -> str:
        """How the data of `state` differ from these; empty if they do not. Raises ConfigError for an invalid state."""
        position, saved = state.get("position"), state.get("data")
        if not (_is_count(state.get("epoch")) and _is_count(position) and isinstance(saved, Mapping)):
            raise ConfigError(f"the checkpoint has no position in the data that this loader knows: {str(state)[:80]!r}")
        own = self._identity()
        for name, words in _WORDS.items():
            if saved.get(name) != own[name] and not (name == "source" and not (saved.get(name) and own[name])):
                return f"the checkpoint was written with {words.format(saved.get(name))}, not {own[name]}"
        if position > self._rows:
            return f"the checkpoint was written after {position} samples of an epoch that has {self._rows}"
        return ""

    def _identity(self) -> dict[str, Any]:
        """What the order of samples depends on."""
        seed = self._config.seed if self._shuffle else None
        return {"rows": self._rows, "seed": seed, "shuffle": self._shuffle, "source": self.source}

    @property
    def _rows(self) -> int:
        return len(cast("Sized", self.dataset))

    def _order(self, epoch: int) -> list[int]:
        import torch

        if not self._shuffle:
            return list(range(self._rows))
        generator = torch.Generator().manual_seed(self._config.seed + epoch * 1_000_003)
        return torch.randperm(self._rows, generator=generator).tolist()

    def _batches(self, order: Sequence[int]) -> list[list[int]]:
        batches = [list(order[start : start + self._batch_size]) for start in range(0, len(order), self._batch_size)]
        if self._drop_last and batches and len(batches[-1]) < self._batch_size:
            batches.pop()
        return batches


_WORDS = {
    "rows": "{} training samples",
    "shuffle": "data.shuffle={}",
    "seed": "data.seed={}",
    "source": "training files whose content has the hash {}",
}


def build_dataloader(
    dataset: Dataset[dict[str, Any]],
    config: DataSettings,
    batch_size: int,
    shuffle: bool,
    drop_last: bool = False,
    source: str = "",
) -> PromptLoader:
    return PromptLoader(dataset, config, batch_size, shuffle, drop_last, source)


def fingerprint(files: Sequence[Path]) -> str:
    """A digest of the files' contents, in their order, without their paths. Other entries count by name."""
    digest = xxhash.xxh3_128()
    for path in files:
        if not path.is_file():
            digest.update(str(path).encode())
            continue
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_NBYTES):
                digest.update(chunk)
    return digest.hexdigest()


def collate_fn(data_list: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object array per key of any item, None for items without it. Values that are all tensors are stacked."""
    import torch

    columns: dict[str, Any] = {}
    for key in dict.fromkeys(key for item in data_list for key in item):
        values: list[Any] = [item.get(key) for item in data_list]
        if all(isinstance(value, torch.Tensor) for value in values):
            columns[key] = torch.stack(values)
        else:
            columns[key] = np.empty(len(values), dtype=object)
            for position, value in enumerate(values):
                columns[key][position] = value
    return columns


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
