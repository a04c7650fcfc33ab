"""Who sends to whom, as data. Pure functions of the members; every backend picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.checkpoint_engine.types import Member


@dataclass(frozen=True, slots=True)
class Topology:
    """`audience[sender]` are the names of the members that receive the sender's pieces."""

    trainers: tuple[Member, ...]
    nodes: tuple[Member, ...]
    audience: dict[str, tuple[str, ...]]


def direct(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """Every trainer rank's pieces go straight to every rollout node."""
    everyone = tuple(node.name for node in nodes)
    return Topology(tuple(trainers), tuple(nodes), {trainer.name: everyone for trainer in trainers})
