"""Pads batches that do not divide over the trainer ranks, so that each rank gets equally many sequences."""

from __future__ import annotations

import numpy as np
import torch

from verl.protocol import PADDING, DataProto, tensors_of


def padded(batch: DataProto, ranks: int) -> DataProto:
    """`batch`, padded with copies of its last sequence to a multiple of `ranks`; `batch` itself if it divides.

    A copy has an empty `response_mask`, no reward, and a uid of its own. So it changes no loss, advantage, or metric
    that uses `response_mask`.
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
    """`batch` without the copies that `padded` added; the order is kept."""
    is_padding = batch.non_tensor_batch.get(PADDING)
    if is_padding is None:
        return batch
    kept: DataProto = batch[np.flatnonzero(~is_padding.astype(bool)).tolist()]
    kept.non_tensor_batch.pop(PADDING)
    return kept
