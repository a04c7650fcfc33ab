"""The driver's view of the keepers of the trainer ranks' states, and what remains when some are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from verl.checkpoint_engine.errors import CheckpointEngineError, TransportError

KEEPS_WITHIN_S = 60.0
"""A keeper that has not answered by then is given up; an idle one answers within milliseconds."""
FREES_WITHIN_S = 10.0
"""Afterwards a keeper is killed; its cleanup process then frees its memory."""
MOST_IN_GROUP = 5
"""Hosts in a group, of which one may be lost. With n hosts, parity takes 2 / (n - 1) of a state's memory, and
rebuilding a lost host's state reads n - 1 states."""

Held = tuple[Mapping[int, Sequence[int]], Sequence[int]]
"""Of one keeper: the steps whose state it has, by rank, and the steps whose parity it has."""


@dataclass(frozen=True)
class Keeper:
    """The keeper of one host."""

    ranks: tuple[int, ...]
    node: str
    address: str
    actor: Any


@dataclass(frozen=True)
class Found:
    """Where the ranks' states of one step are after a loss."""

    step: int
    whole: tuple[int, ...]
    """Numbers of the keepers that have the states of all their ranks."""
    lost: Mapping[int, range]
    """By number of a lost keeper: the group whose other members can rebuild its ranks' states."""


def groups_of(number: int) -> list[range]:
    """Divide `number` hosts into groups of about equal size, of two or more. Pure."""
    if number < 2:
        return []
    count = -(-number // MOST_IN_GROUP)
    bounds = [index * number // count for index in range(count + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def find(step: int, ranks: Sequence[Sequence[int]], held: Sequence[Held | None]) -> Found:
    """Find the states of `step`, else the step before. `ranks` are each keeper's; `held`: None for a lost one. Pure.

    Raises TransportError if neither step is whole.
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
    """What each keeper has; None for a lost one."""
    asked = [keeper.actor.steps.remote() for keeper in keepers]
    held: list[Held | None] = []
    for reference in asked:
        try:
            held.append(ray.get(reference, timeout=KEEPS_WITHIN_S))
        except RayError:
            held.append(None)
    return held


def end(keepers: Sequence[Keeper]) -> None:
    """Have the keepers free their memory, then kill them."""
    if keepers:
        freed = [keeper.actor.close.remote() for keeper in keepers]
        ray.wait(freed, num_returns=len(freed), timeout=FREES_WITHIN_S)
    for keeper in keepers:
        ray.kill(keeper.actor)


def answer(asked: Any, timeout_s: float = KEEPS_WITHIN_S) -> Any:
    """The answers of keepers; raises a keeper's own error."""
    try:
        return ray.get(asked, timeout=timeout_s)
    except RayTaskError as exc:
        raise cause(exc) from None


def cause(exc: RayTaskError) -> Exception:
    """The keeper's own error within Ray's."""
    return exc.cause if isinstance(exc.cause, CheckpointEngineError) else exc
