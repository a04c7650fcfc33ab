"""The processes that keep the state of trainer ranks, as the driver knows them, and what is left when some are gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from verl.checkpoint_engine.errors import CheckpointEngineError, TransportError

KEEPS_WITHIN_S = 60.0
"""A keeper that has not answered by then is given up; without load it takes milliseconds."""
FREES_WITHIN_S = 10.0
"""Afterwards a keeper is killed; then what watches its memory frees it."""
MOST_IN_GROUP = 5
"""Hosts, of which one may be lost. Parity takes two states divided by one host fewer; to make a lost one's state again
takes reading as many states as there are others."""

Held = tuple[Mapping[int, Sequence[int]], Sequence[int]]
"""Of one keeper: the steps of which it has the state, by rank, and those of which it has parity."""


@dataclass(frozen=True)
class Keeper:
    """That of one host."""

    ranks: tuple[int, ...]
    node: str
    address: str
    actor: Any


@dataclass(frozen=True)
class Found:
    """What is left of the state of all ranks."""

    step: int
    whole: tuple[int, ...]
    """Keepers that have what their ranks left, by number."""
    lost: Mapping[int, range]
    """Those whose ranks' state the other members of their group can make again, and the group."""


def groups_of(number: int) -> list[range]:
    """So many hosts in groups of about the same size, of two or more. Pure."""
    if number < 2:
        return []
    count = -(-number // MOST_IN_GROUP)
    bounds = [index * number // count for index in range(count + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def find(step: int, ranks: Sequence[Sequence[int]], held: Sequence[Held | None]) -> Found:
    """Of `step`, or of the one before it. `ranks`: of each keeper; `held`: None of one that is gone. Pure.

    Raises TransportError if neither is whole.
    """
    for one in (step, step - 1):
        whole = [
            number
            for number, here in enumerate(held)
            if here is not None and all(one in here[0].get(rank, ()) for rank in ranks[number])
        ]
        lost: dict[int, range] = {}
        for group in groups_of(len(ranks)):
            gone = [number for number in group if number not in whole]
            others = [held[number] for number in group if number in whole]
            if len(gone) == 1 and all(here is not None and one in here[1] for here in others):
                lost[gone[0]] = group
        if len(whole) + len(lost) == len(ranks):
            return Found(one, tuple(whole), lost)
    raise TransportError("it is not whole on the hosts that are left")


def held_by(keepers: Sequence[Keeper]) -> list[Held | None]:
    """What each has; None of those that went with their host."""
    asked = [keeper.actor.steps.remote() for keeper in keepers]
    held: list[Held | None] = []
    for reference in asked:
        try:
            held.append(ray.get(reference, timeout=KEEPS_WITHIN_S))
        except RayError:
            held.append(None)
    return held


def end(keepers: Sequence[Keeper]) -> None:
    """Have them free their memory, and end."""
    if keepers:
        freed = [keeper.actor.close.remote() for keeper in keepers]
        ray.wait(freed, num_returns=len(freed), timeout=FREES_WITHIN_S)
    for keeper in keepers:
        ray.kill(keeper.actor)


def answer(asked: Any, timeout_s: float = KEEPS_WITHIN_S) -> Any:
    """Raises what a keeper raised."""
    try:
        return ray.get(asked, timeout=timeout_s)
    except RayTaskError as exc:
        raise cause(exc) from None


def cause(exc: RayTaskError) -> Exception:
    """What a keeper raised."""
    return exc.cause if isinstance(exc.cause, CheckpointEngineError) else exc
