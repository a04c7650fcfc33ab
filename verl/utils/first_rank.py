"""Actions of rank 0 alone between collectives of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from verl.utils.config import ConfigError
from verl.utils.disk import DiskFull


class FirstRank:
    """A context manager on every rank; `do` acts on rank 0.

    If one fails, the block continues to its end, because other ranks wait in its collectives; then every rank raises.
    Otherwise the others would wait for rank 0 until their deadline.
    """

    def __init__(self) -> None:
        self._is_first = dist.get_rank() == 0
        self._failure: Exception | None = None

    def do(self, action: Callable[[], object]) -> None:
        """Call `action` on rank 0, unless an earlier action has failed."""
        if not self._is_first or self._failure is not None:
            return
        try:
            action()
        except Exception as exc:  # noqa: BLE001 - raised when the block ends
            self._failure = exc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        told: list[Any] = [None]
        if self._failure is not None:
            travels = isinstance(self._failure, (DiskFull, ConfigError))
            told = [self._failure if travels else RuntimeError(f"on rank 0: {self._failure}")]
        dist.broadcast_object_list(told, src=0)
        if self._failure is not None:
            raise self._failure
        if told[0] is not None:
            raise told[0]
