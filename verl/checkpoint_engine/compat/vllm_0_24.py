"""vLLM 0.24: adapt its workers to the interface of later versions. Imported only in vLLM's processes.

Its workers create a weight-transfer engine with fewer arguments, and unpack the model's parameters themselves before a
load. From 0.25 on the engine reloads the model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .vllm import put_around


def makes_engines_of_less() -> bool:
    """Whether this vLLM creates weight-transfer engines without `vllm_config`."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    return "vllm_config" not in inspect.signature(WeightTransferEngine.__init__).parameters


def configuration() -> Any:
    """The configuration of the worker that is creating an engine. `adapt_workers` must have been called."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def adapt_workers(name: str) -> None:
    """Make `configuration` available while workers create engines, and let the engine `name` alone reload the model,
    whatever `is_checkpoint_format` a caller passes. Idempotent."""
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
