"""vLLM 0.24: what its workers lack, and do, that those of later versions do not. Imported in vLLM's processes alone.

Its workers make an engine out of fewer arguments, and take the model's parameters apart themselves before a load, where
an engine of 0.25 or later reloads the model as it likes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .vllm import put_around


def makes_engines_of_less() -> bool:
    """Whether this vLLM is such a one."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    return "vllm_config" not in inspect.signature(WeightTransferEngine.__init__).parameters


def configuration() -> Any:
    """Of the worker that makes an engine right now: `adapt_workers` has been called."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def adapt_workers(name: str) -> None:
    """Have workers make engines where `configuration` can be asked for, and leave the model to the engine `name`,
    whatever a caller says. Idempotent."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu_worker import Worker

    def load_model(load: Callable[..., None], worker: Any, *arguments: Any, **named: Any) -> None:
        with set_current_vllm_config(worker.vllm_config):
            load(worker, *arguments, **named)

    def start_weight_update(start: Callable[..., None], worker: Any, is_checkpoint_format: bool = True) -> None:
        transfer = worker.vllm_config.weight_transfer_config
        start(worker, is_checkpoint_format and (transfer is None or transfer.backend != name))

    for around in (load_model, start_weight_update):
        put_around(Worker, around.__name__, around)
