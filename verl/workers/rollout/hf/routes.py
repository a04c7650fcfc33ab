"""Record the experts that a model of transformers chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from verl.utils.config import ConfigError


class RouteWatch:
    """Keeps the choices of the routers of `model` in its last pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ConfigError for a model whose routers do not show their choices."""
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if not routers:
            raise ConfigError(
                f"rollout.enable_rollout_routing_replay=true: {type(model).__name__} has no routers that report which "
                "experts they chose"
            )
        self._chosen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._look)

    def _look(self, _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._chosen.append(output[-1])  # logits, scores, experts

    def take(self, mask: torch.Tensor) -> list[np.ndarray]:
        """Each sequence's experts in a pass: int16 [tokens, layers, k]. `mask` [sequences, columns] drops padding."""
        chosen, self._chosen = torch.stack(self._chosen, dim=1).cpu(), []
        chosen = chosen.view(*mask.shape, *chosen.shape[1:]).to(torch.int16)
        return [row[kept].numpy() for row, kept in zip(chosen, mask.bool(), strict=True)]
