"""What vLLM's worker is asked about the adapters that it holds. Runs in the engine core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from vllm.lora.request import LoRARequest

PREFIX, SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
"""Of the names in peft's files, before and after those of the model's layers."""
RPC_ADAPTABLE, RPC_HOLD = "adaptable_layers", "hold_adapter"


def digest_of(tensor: torch.Tensor) -> str:
    """Of its type, shape and bytes."""
    data = xxhash.xxh3_64_hexdigest(tensor.contiguous().view(torch.uint8).numpy().data)
    return f"{tensor.dtype} {list(tensor.shape)} {data}"


class AdapterExtension:
    """A `worker_extension_cls` of vLLM, for an engine of one rank on the processor."""

    def adaptable_layers(self: Any) -> list[str]:
        """The layers for which the engine has places of adapters, by the checkpoint's names."""
        return [layer for layer, *_ in _places(self.model_runner.get_model().lora_manager)]

    def hold_adapter(self: Any, directory: str, adapter_id: int, unused: list[int]) -> dict[str, str]:
        """Load a version in the place of `unused` ones. Returns digests of the tensors that are computed with, by the
        names of peft's files.

        Layers whose two tensors are zero are left out. Raises RuntimeError if values are beyond the adapter's rank.
        """
        for each in unused:
            self.remove_lora(each)
        self.add_lora(LoRARequest(str(adapter_id), adapter_id, directory))
        manager = self.model_runner.get_model().lora_manager
        if manager.lora_index_to_id[-1] is not None:
            raise RuntimeError("the last slot has an adapter, and requests without one would be computed with it")
        slot, rank = manager.lora_index_to_id.index(adapter_id), manager.get_adapter(adapter_id).rank
        found: dict[str, str] = {}
        for layer, first, second in _places(manager):
            one, other = first[slot, 0], second[slot, 0]
            if one[rank:].any() or other[:, rank:].any():
                raise RuntimeError(f"{layer} has values beyond rank {rank}")
            if one.any() or other.any():
                pair = one[:rank], other[:, :rank]
                found |= {PREFIX + layer + suffix: digest_of(t) for suffix, t in zip(SUFFIXES, pair, strict=True)}
        return found


def _places(manager: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each layer with its A [slots, 1, rank, inputs] and B [slots, 1, outputs, rank], scaled."""
    for name, module in manager.modules.items():
        firsts, seconds = module.lora_a_stacked, module.lora_b_stacked
        if isinstance(firsts, torch.Tensor):
            firsts, seconds = (firsts,), (seconds,)
        yield from zip(manager.packed_modules.get(name, [name]), firsts, seconds, strict=True)
