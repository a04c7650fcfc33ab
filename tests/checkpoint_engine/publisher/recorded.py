"""A publisher whose servers are in its own process, and remember what they have loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.checkpoint_engine.fakes import RecordingReplica
from verl.checkpoint_engine import WeightPublisher

URL = "http://127.0.0.1:1"


class RecordingServer(RecordingReplica):
    """`refuses`: what `check` raises."""

    answers = True

    def __init__(self, name: str = URL) -> None:
        super().__init__(name)
        self.checked: Mapping[str, tuple[str, tuple[int, ...]]] = {}
        self.refuses: Exception | None = None
        self.copies: dict[str, str] = {}

    async def check(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Mapping[str, str]:
        self.log.append("check")
        self.checked = tensors
        if self.refuses is not None:
            raise self.refuses
        return self.copies

    async def claim(self) -> str:
        return self.name

    async def release(self) -> None: ...

    async def go_on(self, version: int) -> None: ...


class RecordedPublisher(WeightPublisher):
    def __init__(self, model: Any, **named: Any) -> None:
        self.server = RecordingServer()
        super().__init__(model, [URL], **named)

    def _replica(self, name: str) -> Any:
        return self.server


def is_loaded(server: RecordingServer, expected: Mapping[str, torch.Tensor]) -> bool:
    """Names, dtypes and bits."""
    return server.weights.keys() == expected.keys() and all(
        server.weights[name].dtype == tensor.dtype and torch.equal(server.weights[name], tensor)
        for name, tensor in expected.items()
    )
