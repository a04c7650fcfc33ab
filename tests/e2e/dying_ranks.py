"""Ranks that load this module kill themselves as `faults.plan` says. In other processes it changes nothing.

Each dies once. Ray has copies of the methods of a worker's class, so it is what those call that is replaced.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.e2e.faults import DIRECTORY, LOG_PROBS, PUBLISH, REMEMBER, SAVE, UPDATE, WRITE
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank
from verl.workers.engine import background
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.engine.megatron.engine import MegatronEngine
from verl.workers.memory_checkpoint.rank import RankMemory

BEGUN_S = 0.2
"""Until the call that has begun to write has returned."""
LATER_S = 0.002
"""In the midst of what takes some milliseconds."""

_model: Path | None = None
_engine: Any = None
_mini_batches: Counter[int] = Counter()
_dies_soon = False


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_if_planned(step: int, what: str, *, later: bool = False) -> None:
    if _model is None or not (_model / DIRECTORY).exists():  # another process than a rank of such a run
        return
    fault = _model / DIRECTORY / f"{step}-{dist.get_rank()}-{what}"
    if fault.exists():
        fault.unlink()
        if later:
            global _dies_soon
            _dies_soon = True
            threading.Timer(LATER_S, _kill).start()
        else:
            _kill()


def _before(cls: type, method: str, look: Callable[..., None]) -> None:
    original = vars(cls)[method]

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        look(self, *arguments)
        return original(self, *arguments, **named)

    setattr(cls, method, call)


def _is_policy(engine: Any) -> bool:
    return "Value" not in type(engine).__name__ and engine._optim_config is not None


def _built(engine: Any) -> None:
    global _model, _engine
    _model = Path(engine._model_config.path)
    _engine = engine if _is_policy(engine) else _engine


def _log_probs(engine: Any, *_: Any) -> None:
    if _is_policy(engine):
        _die_if_planned(engine._lr_step + 1, LOG_PROBS)


def _update(engine: Any, *_: Any) -> None:
    if _is_policy(engine):
        _mini_batches[engine._lr_step] += 1
        if _mini_batches[engine._lr_step] == 2:
            _die_if_planned(engine._lr_step + 1, UPDATE)


def _published(*_: Any) -> None:
    """What was to be in the midst of a copy is over, on a machine that is so busy."""
    if _dies_soon:
        _kill()


def _remember(*_: Any) -> None:
    if _engine is not None:
        _die_if_planned(_engine._lr_step, REMEMBER, later=True)


def _write_state(directory: Path, *arguments: Any, **named: Any) -> None:
    """In the background, when training may be at a later step: the critic's is the last that is begun."""
    if directory.name == "critic":
        time.sleep(BEGUN_S)
        _die_if_planned(int(directory.parent.name.removeprefix(".global_step_").removesuffix(".partial")), WRITE)
    write_state(directory, *arguments, **named)


write_state, background.write_state = background.write_state, _write_state
for engine_class in (FSDPEngine, MegatronEngine):
    _before(engine_class, "build", _built)
    _before(engine_class, "compute_log_prob", _log_probs)
    _before(engine_class, "train_mini_batch", _update)
    _before(engine_class, "save_checkpoint", lambda engine, *_: _die_if_planned(engine._lr_step, SAVE))
_before(TrainerRank, "publish", lambda _, version, *others: _die_if_planned(version, PUBLISH, later=True))
_before(TrainerRank, "published", _published)
_before(RankMemory, "begin_copy", _remember)
