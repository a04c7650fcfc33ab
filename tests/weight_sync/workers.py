"""Ray workers that tests can look into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.checkpoint_engine.fakes import RowShardedSource
from verl.checkpoint_engine.ports import WeightSource
from verl.single_controller import Dispatch, register
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.weight_sync.publisher import WeightPublisher

GATHERING: tuple[tuple[Any, str], ...] = (
    (DTensor, "full_tensor"),
    (DTensor, "redistribute"),
    (FSDPModule, "unshard"),
    (FullyShardedDataParallel, "summon_full_params"),
    (FlatParamHandle, "unshard"),
    (torch.nn.Module, "state_dict"),
    (dcp_state_dict, "get_model_state_dict"),
)
"""Every way to a whole tensor on one rank that torch offers for a sharded model."""


class WatchedWorker(ActorRolloutRefWorker):
    """Counts collectives and gathers of the whole process, whatever thread they come from."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def watch(self) -> None:
        self._calls: Counter[str] = Counter()
        self._collectives_before = collectives()
        self._patches = ExitStack()
        patch = self._patches.enter_context(pytest.MonkeyPatch.context())
        for owner, name in GATHERING:
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._calls[name] += 1
            return function(*arguments, **named)

        return call

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def watched(self) -> tuple[int, dict[str, int]]:
        """Since `watch`: collectives, and calls of GATHERING by name."""
        self._patches.close()
        return collectives() - self._collectives_before, dict(self._calls)


def collectives() -> int:
    """How many collectives this process has started on its groups: each one takes a sequence number of its group."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


class PlainTrainer(WeightPublisher):
    """A trainer rank over plain tensors behind the project's own publisher: starts quickly, to be killed."""

    def __init__(self, model_path: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def weight_source(self) -> WeightSource:
        return RowShardedSource(self._weights, self.rank, self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> None:
        """The same change on every rank."""
        noise = torch.Generator().manual_seed(seed)
        for weight in self._weights.values():
            weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.05)
