"""Under which names this package is installed. The same files are `verl.checkpoint_engine` and `verl_sync`."""

from __future__ import annotations

PACKAGE = (__package__ or "").rpartition(".")[0]
"""The import name. Strings that name a module of this package begin with it."""
DISTRIBUTION = "verl-sync" if PACKAGE.startswith("verl.") else "verl-sync-engine"
"""What pip calls it."""


def extra(name: str) -> str:
    """The command that brings an optional dependency, for messages."""
    return f"pip install '{DISTRIBUTION}[{name}]'"
