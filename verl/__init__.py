"""RL post-training with transactional, verified weight synchronisation.

Importing this package loads none of torch, ray or vllm: names are resolved on first use. What is
imported of verl's and is not here says what to write instead (`verl.instead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.instead import install

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = ["DataProto", "__version__"]
__version__ = "0.1.0"

install()


def __getattr__(name: str) -> object:
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
