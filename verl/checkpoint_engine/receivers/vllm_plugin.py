"""The function that vLLM calls in each of its processes, through the entry-point group `vllm.general_plugins`."""

from __future__ import annotations

ENGINE_NAME = "verl_arena"
"""What to write in vLLM's `weight_transfer_config` to have weights loaded from a node arena."""


def register() -> None:
    """Make `ENGINE_NAME` known to vLLM. Idempotent: vLLM may load its plugins more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "verl.checkpoint_engine.receivers.vllm_engine", "ArenaWeightTransferEngine"
        )
