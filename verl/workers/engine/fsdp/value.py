"""The critic's engine: FSDP2 under a head that gives every token a value."""

from __future__ import annotations

import torch

from verl.protocol import DataProto
from verl.workers.engine.fsdp.forward import response_values
from verl.workers.engine.fsdp.fsdp2 import FSDP2Engine
from verl.workers.engine.fsdp.model import TOKEN_VALUES
from verl.workers.engine.micro_batches import MicroBatchLimits


class FSDP2ValueEngine(FSDP2Engine):
    """The critic's engine. Losses get values instead of log-probs, and no entropy.

    Implements `verl.workers.engine.base.ValueEngine`.
    """

    head = TOKEN_VALUES

    def compute_values(self, data: DataProto, *, limits: MicroBatchLimits) -> torch.Tensor:
        return self.compute_log_prob(data, temperature=1.0, limits=limits)[0]

    def _forward(
        self, micro_batch: DataProto, temperature: float, calculate_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        values = response_values(
            self._built(), micro_batch, pack=self._packs, sharers=self._sharers, sight=self._sight(micro_batch)
        )
        return values, None
