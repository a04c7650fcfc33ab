"""How many prompts may be started before the next sync. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class StalenessBudget:
    """Bounds what is in flight or queued, and with it the age of what the trainer gets.

    A sync leaves some prompts that were started before it. They and the ones started after it are at most `limit` until
    the next sync, whether the trainer takes some meanwhile or not: what it has taken was trained on and makes the next
    version, so a prompt that is started in its place is another one ahead of that version.
    """

    limit: int
    _counted: set[int] = field(default_factory=set)
    """Prompts, by their places in the order in which they were drawn."""

    @property
    def is_spent(self) -> bool:
        return len(self._counted) >= self.limit

    def start(self, prompt: int) -> None:
        """One more is in flight."""
        assert not self.is_spent
        self._counted.add(prompt)

    def synced(self, outstanding: Iterable[int]) -> None:
        """Those are in flight or queued while the engines get a new version."""
        self._counted = set(outstanding)

    def give_back(self, prompts: Iterable[int]) -> None:
        """The trainer has taken them, and will not train on them: others may be started in their places.

        Those that it took before the last sync do not count any more anyway.
        """
        self._counted.difference_update(prompts)
