"""What a keeper of states lets others read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Lent:
    """States of one step, until the keeper gives that up."""

    wire: bytes
    places: Mapping[int, tuple[int, int]]
    """By rank: where it lies in the keeper's memory, and how many bytes."""
    digests: Mapping[int, bytes]
    plans: Mapping[int, bytes]
    """If they were asked for."""
    parity: int | None
    """Where that of the step lies, if it was asked for."""
