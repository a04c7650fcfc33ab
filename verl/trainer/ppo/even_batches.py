"""Batches whose sequences do not divide over the trainer's ranks: each rank gets equally many, some of them padding."""

from __future__ import annotations

import numpy as np
import torch

from verl.protocol import DataProto, tensors_of

PADDING = "__padding__"


def padded(batch: DataProto, ranks: int) -> DataProto:
    """`batch` with copies of its last sequence up to the next multiple of `ranks`; itself if nothing is missing.

    No token of a copy has a loss or a reward, and it is of a group of its own: losses, advantages and the metrics that
    follow `response_mask` are those of the sequences that there are.
    """
    count = len(batch)
    missing = -count % ranks
    if not missing:
        return batch
    larger = batch[[*range(count), *[count - 1] * missing]]
    tensors = tensors_of(larger)
    for name in ("response_mask", "token_level_scores"):
        tensors[name] = torch.cat([tensors[name][:count], torch.zeros_like(tensors[name][count:])])
    uids = larger.non_tensor_batch["uid"].copy()
    uids[count:] = [f"padding-{index}" for index in range(missing)]
    larger.non_tensor_batch["uid"] = uids
    larger.non_tensor_batch[PADDING] = np.arange(len(larger)) >= count
    return larger


def without_padding(batch: DataProto) -> DataProto:
    """The sequences that there are, in their present order."""
    is_padding = batch.non_tensor_batch.get(PADDING)
    if is_padding is None:
        return batch
    kept: DataProto = batch[np.flatnonzero(~is_padding.astype(bool)).tolist()]
    kept.non_tensor_batch.pop(PADDING)
    return kept
