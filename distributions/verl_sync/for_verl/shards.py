"""verl's FSDP2 engine, which then also says which shards its ranks hold: nothing is gathered from the second sync on.

    actor_rollout_ref.model.external_lib=verl_sync.for_verl.shards

verl imports the module named there in every worker. The first sync gathers as always, and holds the shards against it.
"""

from __future__ import annotations

from typing import Any

from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl.workers.engine import EngineRegistry

from .held import ShardedWeights

VENDORS = {"cuda": ["nvidia", "amd"], "npu": ["huawei"], "cpu": ["cpu"]}
"""verl's registry takes one engine for a device, its own, and one for each vendor, which goes before."""


class ShardedFSDPEngine(FSDPEngineWithLMHead):
    """Named by verl's registry for `actor.strategy=fsdp2`, once this module is imported."""

    def get_per_tensor_param(self, *arguments: Any, **named: Any) -> tuple[Any, Any]:
        gathered, adapters = super().get_per_tensor_param(*arguments, **named)
        if adapters is not None or hasattr(self.module, "peft_config"):  # merged while they are gathered
            return gathered, adapters
        return ShardedWeights(gathered, self.module.state_dict), adapters


for device, vendors in VENDORS.items():
    EngineRegistry.register(model_type="language_model", backend="fsdp2", device=device, vendor=vendors)(
        ShardedFSDPEngine
    )
