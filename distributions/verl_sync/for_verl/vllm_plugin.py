"""The function that vLLM calls in each of its processes, through the entry-point group `vllm.general_plugins`."""

from __future__ import annotations

from ..compat.vllm import knows_weight_transfer_engine
from .pausing import take_dropped_argument
from .registration import ENGINE


def register() -> None:
    """Make `ENGINE` known to vLLM, and verl's servers able to pause it. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if not knows_weight_transfer_engine(ENGINE):
        WeightTransferEngineFactory.register_engine(ENGINE, f"{__package__}.receiver", "ForVerlWeightTransferEngine")
    take_dropped_argument()
