"""verl's functions that pad, cut and mask token ids, for user code; this project does not call them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

CUTS = ("left", "right", "middle")


def clip_by_value(x: torch.Tensor, tensor_min: torch.Tensor, tensor_max: torch.Tensor) -> torch.Tensor:
    """`x` clipped to bounds that are tensors; the lower one has precedence."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


def gather_from_labels(data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """`data[..., label]`: [..., V], [...] -> [...]."""
    return data.gather(-1, label[..., None])[..., 0]


def get_response_mask(
    response_id: torch.Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """1 up to and including the first end token, 0 after it: [B, T] -> [B, T]."""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device))
    return (ends.cumsum(-1) - ends.long() == 0).to(dtype)


def pad_sequence_to_length(
    tensors: torch.Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> torch.Tensor:
    """[..., T] -> [..., max(T, max_seq_len)]."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[float]], pad_token_id: float, max_length: int | None = None
) -> torch.Tensor:
    """Lists of numbers padded on the right to the longest, or to `max_length` if that is more: [B, T]."""
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (length - len(row))] for row in response])


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, each [B, T] -> [B, max_length]: padded, or cut at the side that `truncation` names.

    `middle` keeps half of the places at either side, and the odd one on the right. Raises NotImplementedError for
    `error` if a row is too long, and AssertionError for another value.
    """
    if truncation not in (*CUTS, "error"):
        raise AssertionError(f"truncation={truncation!r} is not left, right, middle or error")
    length = input_ids.shape[-1]
    if length > max_length:
        if truncation == "error":
            raise NotImplementedError(f"sequence_length={length} is larger than max_length={max_length}")
        left = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
        kept = torch.tensor([*range(left), *range(length - max_length + left, length)], device=input_ids.device)
        return input_ids[:, kept], attention_mask[:, kept]
    return (
        pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
        pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
    )


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Positions from the first token of each row on; padding has the position of the token before it, or 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
