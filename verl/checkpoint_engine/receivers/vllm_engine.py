"""The vLLM side of a sync: a weight-transfer engine that loads a committed version from a node arena.

Runs inside every vLLM worker (one per tensor-parallel rank), with or without a trainer of ours. The update request is
`{"arena_path": str, "version": int}`; the bytes are on this host already. Each rank maps the arena read-only and feeds
views of it to the model's own `load_weights` inside vLLM's layerwise reload: a rank copies only its slice of a tensor,
and vLLM's post-processing of fused, packed and quantised layouts runs as for a checkpoint from disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl.checkpoint_engine.arena import read_committed
from verl.checkpoint_engine.errors import ActivationError


@dataclass
class ArenaInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand: every update names its arena."""


@dataclass
class ArenaUpdateInfo(WeightTransferUpdateInfo):
    """Which version of which arena to load."""

    arena_path: str
    version: int


class ArenaWeightTransferEngine(WeightTransferEngine[ArenaInitInfo, ArenaUpdateInfo]):
    """One per vLLM worker. Called by vLLM on its worker thread: start, receive once, finish."""

    init_info_cls = ArenaInitInfo
    update_info_cls = ArenaUpdateInfo

    def init_transfer_engine(self, init_info: ArenaInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ArenaUpdateInfo) -> None:
        """Load every weight of the version. The reload is closed even when loading fails, so that another can begin.

        Raises ActivationError if the model has parameters that the version does not bring, naming all of them, or the
        version has tensors that the model does not know; IntegrityError if the arena's committed version is another.
        """
        try:
            self._load(update_info)
        except BaseException:
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def _load(self, update_info: ArenaUpdateInfo) -> None:
        version = update_info.version
        model: Any = self.model  # vLLM's models have load_weights; its annotation says only Module
        expected = {name for name, _ in model.named_parameters()}
        try:
            loaded: set[str] | None = model.load_weights(read_committed(update_info.arena_path, version))
        except (KeyError, ValueError, RuntimeError, AssertionError) as exc:  # how vLLM's loaders refuse a tensor
            raise ActivationError(
                f"{type(self.model).__name__} cannot load the version: {type(exc).__name__}: {exc}",
                version=version,
                phase="activate",
            ) from exc
        # Loaders that do not report what they loaded return None; quantised models add parameters of their own.
        if loaded is not None and self.vllm_config.model_config.quantization is None:
            missing = sorted(expected - loaded)
            if missing:
                raise ActivationError(
                    f"{len(missing)} parameters of {type(self.model).__name__} are not among the weights: "
                    f"{', '.join(missing)}",
                    version=version,
                    phase="activate",
                )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing outlives an update."""
