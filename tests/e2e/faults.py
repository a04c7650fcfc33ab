"""Trainer ranks that kill themselves. Ranks load this module where `actor_rollout_ref.model.external_lib` names it.

`plan` writes, into the directory of the model, who is to die when. Each dies once.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.protocol import DataProto
from verl.workers.critic import ActorCriticWorker
from verl.workers.fsdp_workers import ActorRolloutRefWorker

MODULE = __name__
DIRECTORY = "faults"
PUBLISH = "sync_rollout_weights_by_checkpoint"
METHODS = ("compute_log_prob", "update_actor", "update_critic", PUBLISH, "save_checkpoint", "copy_state")
LATER_S = 0.002
"""In the midst of what takes some milliseconds."""


def plan(model: Path, faults: Sequence[tuple[int, int, str]]) -> None:
    """(step, rank, method): that rank dies in that method in that step. `copy_state` has no step: 0 is the first."""
    (model / DIRECTORY).mkdir()
    for step, rank, method in faults:
        (model / DIRECTORY / f"{step}-{rank}-{method}").touch()


def _step_of(arguments: Sequence[Any]) -> int:
    for argument in arguments:
        if isinstance(argument, DataProto):
            return int(argument.meta_info["global_steps"])
        if isinstance(argument, int):
            return argument
        if found := re.search(r"global_step_(\d+)", str(argument)):
            return int(found[1])
    return 0


def _die_if_planned(worker: Any, method: str, arguments: Sequence[Any]) -> None:
    fault = Path(worker.config.model.path) / DIRECTORY / f"{_step_of(arguments)}-{worker.rank}-{method}"
    if fault.exists():
        fault.unlink()
        kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        if method in (PUBLISH, "copy_state"):
            threading.Timer(LATER_S, kill).start()
        else:
            kill()


def _mortal(cls: type, method: str) -> None:
    original = vars(cls)[method]

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        _die_if_planned(self, method, arguments)
        return original(self, *arguments, **named)

    async def call_async(self: Any, *arguments: Any, **named: Any) -> Any:
        _die_if_planned(self, method, arguments)
        return await original(self, *arguments, **named)

    is_async = inspect.iscoroutinefunction(original)
    setattr(cls, method, functools.wraps(original)(call_async) if is_async else call)


for name in METHODS:
    _mortal(next(c for c in (ActorCriticWorker, *ActorRolloutRefWorker.__mro__) if name in vars(c)), name)
