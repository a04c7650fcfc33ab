"""How far apart the log-probs of a server and those of the oracle are, and how far they may be. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """What rounding may make of log-probs.

    The distance is the largest mean difference over `in_a_row` tokens. In a coarse dtype rounding averages out over
    them, and a tensor that is missing does not. It is a norm: what is more than twice `nats` away from one version
    cannot be let pass for it, whatever rounding adds within `nats`.
    """

    nats: float
    in_a_row: int = 1

    def away(self, found: Tensor, expected: Tensor) -> float:
        """The distance, in nats, of log-probs of tokens one after the other, [number of tokens]. NaN if one is no
        number."""
        return self.size((found - expected).abs())

    def size(self, differences: Tensor) -> float:
        """The distance that these absolute differences are."""
        if not len(differences):
            return 0.0
        rows = differences.unfold(0, min(self.in_a_row, len(differences)), 1)
        return float(rows.mean(-1).max())

    def allows(self, found: Tensor, expected: Tensor) -> bool:
        """Whether they are near enough, all of them numbers."""
        return self.away(found, expected) <= self.nats

    def __str__(self) -> str:
        over = f" in the mean of {self.in_a_row} tokens in a row" if self.in_a_row > 1 else ""
        return f"{self.nats:g} nats{over}"


TOLERANCES = {"float32": Tolerance(2e-4), "bfloat16": Tolerance(0.1, 24), "float16": Tolerance(0.02)}
"""By dtype: what computing in another order may make."""
