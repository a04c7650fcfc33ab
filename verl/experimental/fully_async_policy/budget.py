"""Limits the prompts that may be started before the next sync. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class StalenessBudget:
    """Bounds the number of prompts in flight or queued, and so the age of the trainer's samples.

    The prompts outstanding at a sync, and those started after it, are at most `limit` until the next sync. Samples that
    the trainer takes meanwhile still count: it trains on them for the next version, so a prompt started in their place
    would be one more ahead of that version.
    """

    limit: int
    _counted: set[int] = field(default_factory=set)
    """Prompts, by their places in the order in which they were drawn."""

    @property
    def is_spent(self) -> bool:
        return len(self._counted) >= self.limit

    def start(self, prompt: int) -> None:
        """Count one more prompt in flight."""
        assert not self.is_spent
        self._counted.add(prompt)

    def synced(self, outstanding: Iterable[int]) -> None:
        """Count only `outstanding`: the prompts in flight or queued while the engines get a new version."""
        self._counted = set(outstanding)

    def give_back(self, prompts: Iterable[int]) -> None:
        """Stop counting prompts that the trainer took but will not train on: others may be started instead.

        Prompts that it took before the last sync no longer count anyway.
        """
        self._counted.difference_update(prompts)
