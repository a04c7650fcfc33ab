"""Batches of prompts in an order that a checkpoint can return to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from verl.utils.dataset.settings import DataSettings

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from torchdata.stateful_dataloader import StatefulDataLoader


def build_dataloader(
    dataset: Dataset[dict[str, Any]],
    config: DataSettings,
    batch_size: int,
    shuffle: bool,
    drop_last: bool = False,
) -> StatefulDataLoader:
    """Batches for `DataProto.from_dict(non_tensors=batch)`.

    `state_dict()` after a batch and `load_state_dict()` elsewhere give the batches that would have come next; after the
    last one of an epoch, the next epoch's. The order depends on `data.seed` alone.
    """
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    from verl.utils.dataset.sampler import EpochSampler

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)  # torchdata calls it
        return StatefulDataLoader(
            dataset,
            batch_size=batch_size,
            sampler=EpochSampler(len(cast("Sized", dataset)), seed=config.seed, shuffle=shuffle),
            drop_last=drop_last,
            num_workers=config.dataloader_num_workers,
            collate_fn=collate_fn,
            generator=torch.Generator().manual_seed(
                config.seed
            ),  # seeds of worker processes; else the global one is drawn from
        )


def collate_fn(items: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """One object array per key of any item; an item without the key has None."""
    columns: dict[str, np.ndarray] = {}
    for key in dict.fromkeys(key for item in items for key in item):
        columns[key] = np.empty(len(items), dtype=object)
        for position, item in enumerate(items):
            columns[key][position] = item.get(key)
    return columns
