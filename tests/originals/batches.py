"""Batches of responses for formulas: ragged, with holes, in odd groups, with equal scores, without a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Batch = dict[str, Any]
RAGGED = (9, 4, 1, 7, 2, 5)


def batch(
    seed: int,
    index: str,
    *,
    lengths: Sequence[int] = RAGGED,
    holes: Sequence[tuple[int, int]] = (),
    scores: Sequence[float] | None = None,
    spread: float = 0.4,
) -> Batch:
    """All that a formula takes, [B, 9], as lists: `index` has a letter for each response's group, `holes` are tokens
    (row, column) of a tool. A score stands on the last token. `spread` is the deviation of log-ratios."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = len(lengths), 9

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    mask = (torch.arange(columns) < torch.tensor(lengths).unsqueeze(-1)).float()
    for hole in holes:
        mask[hole] = 0.0
    old = -torch.rand(rows, columns, generator=draw) * 2 - 0.05
    given = normal(rows) if scores is None else torch.tensor(scores)
    last = (torch.arange(columns) == torch.tensor(lengths).unsqueeze(-1).clamp(min=1) - 1).float()
    others = torch.rand(rows, columns, generator=draw)  # of what the token leaves, how much is on one other
    tensors = {
        "old_log_prob": old,
        "log_prob": (old + normal(rows, columns) * spread).clamp(max=-0.01),
        "response_mask": mask,
        "rewards": last * given.unsqueeze(-1),
        "values": normal(rows, columns),
        "predicted": normal(rows, columns),
        "returns": normal(rows, columns),
        "baselines": normal(rows),
        "sum_pi_squared": old.exp() ** 2 + others * (1 - old.exp()) ** 2,
        "weights": torch.rand(rows, columns, generator=draw) + 0.5,
        "components": normal(rows, 3),
    }
    return {name: tensor.tolist() for name, tensor in tensors.items()} | {"index": list(index)}


WHOLE = {
    "two groups": batch(0, "aaabbb"),
    "a group of one": batch(1, "abbccc"),
    "groups in turns": batch(2, "abcabb"),
    "holes": batch(3, "aaabbb", lengths=(9, 6, 4, 7, 5, 8), holes=[(0, 3), (0, 4), (3, 2), (5, 1)]),
    "the second longest has holes": batch(8, "aaabbb", lengths=(9, 7, 4, 8, 8, 8), holes=[(1, 1), (1, 2), (3, 4)]),
    "two longest with holes": batch(11, "aaabbb", lengths=(7, 9, 3, 5, 4, 6), holes=[(0, 1), (1, 1), (1, 3), (1, 4)]),
    "equal scores": batch(4, "aaabbb", scores=[0.7] * 3 + [0.3] * 3),
    "scores of zero": batch(4, "aaabbb", scores=[0.0] * 6),
    "one token": batch(5, "aaabbb", lengths=[1] * 6),
    "ties": batch(7, "aaabbb", scores=[1.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
    "one group": batch(9, "aaaaaa"),
}
"""Each response has a token."""
EMPTY = (9, 0, 1, 7, 2, 0)
WITH_EMPTY = {
    "empty responses": batch(6, "aaabbb", lengths=EMPTY, scores=[1.0, 0.0, 0.5, 0.2, -1.0, 0.0]),
    "empty responses with a score": batch(6, "aaabbb", lengths=EMPTY, scores=[1.0, 1.0, 0.5, 0.2, -1.0, 0.3]),
}
ON_A_HOLE = {"a score on a hole": batch(10, "aaabbb", lengths=(9, 6, 4, 7, 5, 8), holes=[(0, 8), (4, 4)])}
ROUNDED = {"equal scores whose mean is rounded": batch(12, "aaabbb", scores=[0.04710861295461655] * 6)}
NOT_FINITE = {
    f"a score of {number}": batch(0, "aaabbb", scores=[number, 1.0, 0.0, 1.0, 0.0, 1.0])
    for number in (math.inf, -math.inf, math.nan)
} | {"infinities of both signs": batch(0, "aaabbb", scores=[math.inf, -math.inf, 0.0, math.inf, math.inf, 1.0])}
