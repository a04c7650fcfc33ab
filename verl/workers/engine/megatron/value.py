"""The critic's engine: Megatron under a head that gives every token a value."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from verl.protocol import DataProto
from verl.workers.engine.fsdp.model import TOKEN_VALUES
from verl.workers.engine.megatron.engine import MegatronEngine
from verl.workers.engine.megatron.forward import PackedBatch, response_values
from verl.workers.engine.micro_batches import MicroBatchLimits


class MegatronValueEngine(MegatronEngine):
    """The critic's engine. Losses get values instead of log-probs, and no entropy.

    Implements `verl.workers.engine.base.ValueEngine`.
    """

    labels: ClassVar[int] = 1

    def compute_values(self, data: DataProto, *, limits: MicroBatchLimits) -> torch.Tensor:
        return self.compute_log_prob(data, temperature=1.0, limits=limits)[0]

    def _of_responses(
        self, outputs: torch.Tensor, packed: PackedBatch, micro_batch: DataProto, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = response_values(outputs, packed)
        return values, torch.zeros_like(values)

    def _load_hf_config(self) -> Any:
        hf_config = super()._load_hf_config()
        for name, value in TOKEN_VALUES.config_fields.items():  # an export says what it is
            setattr(hf_config, name, value)
        return hf_config
