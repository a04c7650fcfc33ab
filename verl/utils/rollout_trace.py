"""verl's place for the decorator of calls that a trace of rollouts shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def rollout_trace_op(func: F) -> F:
    """`func` itself: `actor_rollout_ref.rollout.trace.backend` is refused, so there is no trace to be shown in."""
    return func
