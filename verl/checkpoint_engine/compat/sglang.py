"""SGLang 0.5.23: what a weight loader, which is in the process of a rank's scheduler, asks of that. Imported by all;
where no SGLang is loaded, there is no scheduler."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

PAUSED = "_engine_paused"
"""What a scheduler asks itself before each batch. No public name stops it for good."""


def stay_paused_while(is_torn: Callable[[], bool]) -> None:
    """Have the scheduler of this rank generate nothing as long as that holds, whoever calls `/continue_generation`.
    Requests wait. Idempotent."""
    scheduler = getattr(sys.modules.get("sglang.srt.managers.scheduler"), "Scheduler", None)
    if scheduler is None or PAUSED in vars(scheduler):
        return

    def is_paused(self: Any) -> bool:
        return vars(self).get(PAUSED, False) or is_torn()

    def set_paused(self: Any, paused: bool) -> None:
        if not paused and is_torn():
            logger.error("a load that failed has torn the weights: this server stays paused until one succeeds")
        vars(self)[PAUSED] = paused

    setattr(scheduler, PAUSED, property(is_paused, set_paused))


def asleep() -> list[str]:
    """What of this rank's memory was given back (`/release_memory_occupation`). Only the part of its scheduler that
    calls a loader knows, and a loader is not told who that is."""
    frame = inspect.currentframe()
    while frame is not None:
        given_back = getattr(frame.f_locals.get("self"), "offload_tags", None)
        if given_back is not None:
            return sorted(given_back)
        frame = frame.f_back
    return []


def among_ranks(value: Any) -> list[Any]:
    """`value` of every rank of this SGLang. All of them call it, wherever a rank is alone, too."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [value]
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values
