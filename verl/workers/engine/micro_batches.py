"""Cutting a rank's sequences into micro-batches: pure index arithmetic, and the trimming of padding."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from verl.protocol import DataProto, tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimits:
    """The limits of a micro-batch; None: no limit."""

    max_sequences: int | None = None
    max_tokens: int | None = None
    """Computed tokens: of packed sequences all, else sequences x trimmed width, as padding costs the same."""

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_tokens"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")

    @classmethod
    def choose(cls, *, dynamic: bool, max_tokens: int, max_sequences: int | None) -> MicroBatchLimits:
        """Limits from three options: a number of tokens if `dynamic`, else a number of sequences."""
        return cls(max_tokens=max_tokens) if dynamic else cls(max_sequences=max_sequences)


def sequence_widths(data: DataProto) -> list[tuple[int, int]]:
    """(prompt, response) width of every sequence: columns between the border and the furthest attended token."""
    batch = tensors_of(data)
    mask = batch["attention_mask"].bool()
    num_prompt = mask.shape[1] - batch["responses"].shape[1]
    prompt, response = mask[:, :num_prompt], mask[:, num_prompt:]
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    left = (prompt.flip(1) * positions[:num_prompt]).amax(1)
    right = (response * positions[: response.shape[1]]).amax(1)
    return list(zip(left.tolist(), right.tolist(), strict=True))


def sequence_lengths(data: DataProto) -> list[int]:
    """The length of every sequence: its largest position of an attended token, plus one."""
    batch = tensors_of(data)
    positions: list[int] = batch["position_ids"].masked_fill(~batch["attention_mask"].bool(), 0).amax(1).tolist()
    return [position + 1 for position in positions]


def partition(
    widths: Sequence[tuple[int, int]],
    limits: MicroBatchLimits,
    *,
    packed: bool = False,
    regimes: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Indices of `widths` in groups within `limits`, sequences of like width together so that little padding is left.

    `packed`: the sequences of a group are computed without padding, so any may share one: the longest that is left
    goes into the first group that has room (first-fit decreasing, D. Johnson, 1973). A sequence that exceeds
    `max_tokens` alone gets a group of its own. `regimes`: of each sequence; those of a group have the same.
    """
    if packed:
        return _first_fit([sum(width) for width in widths], limits, regimes)
    groups: list[list[int]] = []
    left = right = 0
    for index in sorted(range(len(widths)), key=lambda i: (-sum(widths[i]), i)):
        new_left, new_right = max(left, widths[index][0]), max(right, widths[index][1])
        num_sequences = len(groups[-1]) + 1 if groups else 1
        num_tokens = num_sequences * (new_left + new_right)
        fits = (limits.max_sequences is None or num_sequences <= limits.max_sequences) and (
            limits.max_tokens is None or num_tokens <= limits.max_tokens
        )
        if regimes is not None and groups:
            fits = fits and regimes[index] == regimes[groups[-1][0]]
        if groups and fits:
            groups[-1].append(index)
            left, right = new_left, new_right
        else:
            groups.append([index])
            left, right = widths[index]
    return groups


def _first_fit(lengths: Sequence[int], limits: MicroBatchLimits, regimes: Sequence[Hashable] | None) -> list[list[int]]:
    groups: list[list[int]] = []
    tokens: list[int] = []

    def has_room(number: int, index: int) -> bool:
        group = groups[number]
        return (
            (limits.max_sequences is None or len(group) < limits.max_sequences)
            and (limits.max_tokens is None or tokens[number] + lengths[index] <= limits.max_tokens)
            and (regimes is None or regimes[index] == regimes[group[0]])
        )

    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        number = next((number for number in range(len(groups)) if has_room(number, index)), len(groups))
        if number == len(groups):
            groups.append([])
            tokens.append(0)
        groups[number].append(index)
        tokens[number] += lengths[index]
    return groups


def split_to_count(groups: list[list[int]], count: int) -> list[list[int]]:
    """Exactly `count` groups, made by halving the largest ones: ranks must run the same number of forward passes.

    Raises ValueError with fewer than `count` sequences.
    """
    groups = [list(group) for group in groups]
    if sum(map(len, groups)) < count:
        raise ValueError(
            f"{count} micro-batches are needed to keep step with the other ranks, but this rank has only "
            f"{sum(map(len, groups))} sequences; give every rank the same number of sequences"
        )
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda i: len(groups[i]))
        group = groups[largest]
        groups[largest : largest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    return groups
