"""Checkpoints in the host memory of many ranks, moved into inference engines on demand. Loads torch when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine_receiver import receive
    from .metas import load_metas, save_metas
    from .server import ParameterServer

_MODULE_OF = {
    "ParameterServer": "server",
    "load_metas": "metas",
    "receive": "engine_receiver",
    "save_metas": "metas",
}

__all__ = ["ParameterServer", "load_metas", "receive", "save_metas"]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
