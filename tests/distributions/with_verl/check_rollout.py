"""What the rollout adapter refuses. Run against the wheel: see `test_for_verl.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from verl_sync.errors import ConfigError
from verl_sync.for_verl.publisher import ranks_with_server
from verl_sync.for_verl.registration import ENGINE
from verl_sync.for_verl.rollout import ServerAdapter

from verl.workers.config import RolloutConfig


async def arriving() -> AsyncIterator[tuple[str, torch.Tensor]]:
    yield "scale", torch.ones(1)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (arriving(), {}, "for rollout workers of their own take .* out, and name the backend"),
        ([], {"wire_format": "delta_flush"}, "sends whole weights, not delta_flush: take"),
        ([], {"peft_config": {"r": 8}}, "sends whole weights, not LoRA adapters: take"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_the_remedy(weights: Any, options: dict[str, Any], message: str):
    adapter = ServerAdapter.__new__(ServerAdapter)  # verl's constructor wants ranks and servers
    adapter.config = RolloutConfig(name="vllm", engine_kwargs={"vllm": {"weight_transfer_config": {"backend": ENGINE}}})
    with pytest.raises(ConfigError, match=message):
        asyncio.run(adapter.update_weights(weights, **options))


def test_servers_are_numbered_by_rank_and_those_of_another_host_are_refused():
    assert ranks_with_server([(True, "a"), (False, "a"), (True, "a")]) == {"replica-0": 0, "replica-1": 2}
    assert ranks_with_server([(True, "a"), (False, "b")]) == {"replica-0": 0}
    with pytest.raises(ConfigError, match="beside the actor ranks 1, 3 do not share the memory of rank 0"):
        ranks_with_server([(True, "a"), (True, "b"), (False, "b"), (True, "c")])
