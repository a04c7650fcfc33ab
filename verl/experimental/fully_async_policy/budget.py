"""How many prompts may be started before the next sync. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StalenessBudget:
    """Bounds what is in flight or queued, and with it the age of what the trainer gets.

    A sync leaves some prompts that were started before it. They and the ones started after it are at most `limit` until
    the next sync, whether the trainer takes some meanwhile or not: what it has taken was trained on and makes the next
    version, so a prompt that is started in its place is another one ahead of that version.
    """

    limit: int
    used: int = 0

    @property
    def is_spent(self) -> bool:
        return self.used >= self.limit

    def start(self) -> None:
        """One more prompt is in flight."""
        assert not self.is_spent
        self.used += 1

    def synced(self, outstanding: int) -> None:
        """`outstanding` prompts are in flight or queued while the engines get a new version."""
        self.used = outstanding
