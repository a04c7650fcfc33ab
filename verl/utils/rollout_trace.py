"""verl's import path of the decorator of calls for traces of rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def rollout_trace_op(func: F) -> F:
    """`func` itself: `actor_rollout_ref.rollout.trace.backend` is refused, so there are no traces."""
    return func
