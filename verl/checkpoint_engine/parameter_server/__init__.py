"""Hold checkpoints in the host memory of many ranks, and move them into inference engines. Loads torch on first use.

Scripts for Moonshot's checkpoint-engine can import its names from here instead of from `checkpoint_engine`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine_receiver import FlattenedTensorMetadata, receive, update_weights_from_ipc
    from .http_server import request_inference_to_update
    from .metas import load_metas, save_metas
    from .server import ParameterServer

_MODULE_OF = {
    "FlattenedTensorMetadata": ".engine_receiver",
    "ParameterServer": ".server",
    "VllmColocateWorkerExtension": "..engines.vllm.extension",
    "load_metas": ".metas",
    "receive": ".engine_receiver",
    "request_inference_to_update": ".http_server",
    "save_metas": ".metas",
    "update_weights_from_ipc": ".engine_receiver",
}

__all__ = [
    "FlattenedTensorMetadata",
    "ParameterServer",
    "VllmColocateWorkerExtension",
    "load_metas",
    "receive",
    "request_inference_to_update",
    "save_metas",
    "update_weights_from_ipc",
]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
