"""The cost of a training step on a rank's device: compute and memory."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from verl.checkpoint_engine.support.memory import memory_watch
from verl.protocol import DataProto, tensors_of
from verl.utils.device import local_device
from verl.utils.flops import is_counted, peak_flops, training_flops
from verl.utils.model import load_hf_config
from verl.workers.config import ActorRolloutRefConfig

MEASURED_PHASES = ("log_prob", "update_actor")
"""The phases whose memory is reported."""


class UpdateCosts:
    """The costs of updates of the policy. Its methods are collectives with the same result on all ranks."""

    def __init__(self, config: ActorRolloutRefConfig, device_name: str, local_rank: int) -> None:
        self._config, self._device_name, self._local_rank = config, device_name, local_rank

    def flops(self, data: DataProto, seconds: float) -> dict[str, float]:
        """The share of the device's peak compute that training on `data` used in `seconds`; the mean of all ranks."""
        if not is_counted(self._hf_config):
            return {}
        lengths = tensors_of(data)["attention_mask"].sum(-1).tolist()
        flops = self._config.actor.ppo_epochs * training_flops(self._hf_config, lengths)
        share = torch.tensor(flops / (seconds * self._peak_flops))
        dist.all_reduce(share)
        return {"perf/mfu/actor": float(share) / dist.get_world_size()}

    def memory(self) -> dict[str, float]:
        """The largest memory use of any rank: in each phase, and since the processes began."""
        watch = memory_watch()
        uses = [*(watch.use_of("trainer", phase) for phase in MEASURED_PHASES), watch.since_start("trainer")]
        numbers = torch.tensor([use.numbers for use in uses], dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        largest = [use.with_numbers(map(int, row)) for use, row in zip(uses, numbers.tolist(), strict=True)]
        metrics = {name: value for use in largest for name, value in use.metrics("trainer").items()}
        if self._device_name == "cpu":
            return metrics | {"perf/cpu_memory_used_gb": largest[-1].host_peak_nbytes / 1024**3}
        most = max(use.device_peak_nbytes for use in largest[:-1])
        return metrics | {"perf/max_memory_allocated_gb": most / 1024**3}

    @cached_property
    def _hf_config(self) -> PretrainedConfig:
        return load_hf_config(self._config.model)

    @cached_property
    def _peak_flops(self) -> float:
        return peak_flops(local_device(self._device_name, self._local_rank))
