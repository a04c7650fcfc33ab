"""The interface of sharding, which FSDP1 and FSDP2 implement; the rest of the engine is common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from verl.compat.transformers import layer_names

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from verl.workers.config import FSDPConfig
    from verl.workers.engine.tensors import HeldTensor


class Sharding(Protocol):
    """A way to spread a model over the ranks of the default process group."""

    def shard(self, model: PreTrainedModel, config: FSDPConfig, device: torch.device) -> nn.Module:
        """Shard `model`, which is on the meta device, and allocate it on `device`. Returns the module to call.

        A collective. Tied parameters stay tied. Raises ConfigError for a `fsdp_size` that does not divide the ranks.
        """

    def held(self, model: nn.Module) -> dict[str, HeldTensor]:
        """This rank's parts of every parameter and persistent buffer, in the same order on every rank.

        Not a collective. Names are the model's: experts may be stacked, and adapters are beside their layers.
        """

    def reshard(self, model: nn.Module) -> None:
        """Free gathered parameters, which a forward pass without a backward pass leaves. Not a collective."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        """Scale the gradients to `max_norm`; return their previous norm over all ranks. A collective."""


def layers_apart(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that transformers does not split, except those inside another such layer.

    Layers that share parameters (as Zamba 2's transformers do) are not among them: in groups of their own each would
    have another copy.
    """
    names = layer_names(model)
    layers = [module for module in model.modules() if type(module).__name__ in names]
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    layers = [layer for layer in layers if id(layer) not in inner]
    layer_of = {id(module): layer for layer in layers for module in layer.modules()}
    homes: dict[int, set[nn.Module | None]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(layer_of.get(id(module)))
    shared = {layer for found in homes.values() if len(found) > 1 for layer in found}
    return [layer for layer in layers if layer not in shared]
