"""SGLang 0.5.23: what code in a scheduler's process needs of it. It can be imported without SGLang, where no scheduler
is."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

PAUSED = "_engine_paused"
"""The attribute that a scheduler checks before each batch. No public name keeps it paused."""


def stay_paused_while(is_torn: Callable[[], bool]) -> None:
    """Keep the scheduler of this rank paused while `is_torn()` is true, even after `/continue_generation`. Requests
    wait. Idempotent."""
    scheduler = getattr(sys.modules.get("sglang.srt.managers.scheduler"), "Scheduler", None)
    if scheduler is None or PAUSED in vars(scheduler):
        return

    def is_paused(self: Any) -> bool:
        return vars(self).get(PAUSED, False) or is_torn()

    def set_paused(self: Any, paused: bool) -> None:
        if not paused and is_torn():
            logger.error(
                "a load that failed has torn the weights: this server stays paused until one succeeds. Push a version, "
                "from any publisher"
            )
        vars(self)[PAUSED] = paused

    setattr(scheduler, PAUSED, property(is_paused, set_paused))


def asleep() -> list[str]:
    """Tags of this rank's memory that `/release_memory_occupation` freed. Only the object that calls a loader has them,
    so it is found in the calling frames."""
    frame = inspect.currentframe()
    while frame is not None:
        given_back = getattr(frame.f_locals.get("self"), "offload_tags", None)
        if given_back is not None:
            return sorted(given_back)
        frame = frame.f_back
    return []


def forget_pictures() -> None:
    """Drop what this rank has computed of pictures that it has seen: `/flush_cache` keeps that, and another version of
    the tower would never see them."""
    seen = getattr(sys.modules.get("sglang.srt.managers.mm_schedule"), "embedding_cache", None)
    if seen is not None:
        seen.clear()


def among_ranks(value: Any) -> list[Any]:
    """Gather `value` of every tensor-parallel rank of this SGLang. All ranks call it; a single one returns its own."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [value]
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


@contextmanager
def own_rotary_tables() -> Iterator[None]:
    """In this block, a new model gets its own tables of rotary embeddings. SGLang shares them between all models of a
    process."""
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT as tables

    shared = dict(tables)
    tables.clear()
    try:
        yield
    finally:
        tables.clear()
        tables.update(shared)
