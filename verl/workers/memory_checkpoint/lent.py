"""The description of memory that a keeper lets others read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Lent:
    """Lent states of one step, valid until the keeper changes them."""

    wire: bytes
    places: Mapping[int, tuple[int, int]]
    """Rank to the address of its state in the keeper's memory, and its bytes."""
    digests: Mapping[int, bytes]
    plans: Mapping[int, bytes]
    """The ranks' plans, if requested."""
    parity: int | None
    """The address of the step's parity, if requested."""
