"""The names under which this package is installed: the same files are `verl.checkpoint_engine` and `verl_sync`."""

from __future__ import annotations

PACKAGE = (__package__ or "").rpartition(".")[0]
"""The import name, with which strings that name a module of this package begin."""
DISTRIBUTION = "verl-sync" if PACKAGE.startswith("verl.") else "verl-sync-engine"
"""The name of the pip distribution."""


def extra(name: str) -> str:
    """The command that installs an optional dependency, for messages."""
    return f"pip install '{DISTRIBUTION}[{name}]'"
