"""The vLLM side of a sync: a weight-transfer engine that loads a committed version from a node arena.

Runs inside every vLLM worker (one per tensor-parallel rank), with or without a trainer of ours. The update request is
`{"arena_path": str, "version": int}`; the bytes are on this host already. Each rank maps the arena read-only and feeds
views of it to the model's own `load_weights` inside vLLM's layerwise reload: a rank copies only its slice of a tensor,
and vLLM's post-processing of fused, packed and quantised layouts runs as for a checkpoint from disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl.checkpoint_engine.arena import open_committed
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

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = ExitStack()
        self._expected: set[str] = set()
        self._tied: list[torch.nn.Module] = []

    def init_transfer_engine(self, init_info: ArenaInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        # Before the reload takes the parameters apart, a tied one is one object: named once, shared by two layers.
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._tied = tied_layers(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ArenaUpdateInfo) -> None:
        """Load every weight of the version. The reload is closed even when loading fails, so that another can begin.

        Raises ActivationError if the model has parameters that the version does not bring, naming all of them, or the
        version has tensors that the model does not know; IntegrityError if the arena's committed version is another.
        """
        try:
            # Layers that vLLM completes only in `finish` still read the views: the version stays mapped until then.
            _, slot = self._reading.enter_context(open_committed(update_info.arena_path, update_info.version))
            self._load(slot.tensors(), update_info.version)
        except BaseException:
            self.finish_weight_update()
            raise

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        model: Any = self.model  # vLLM's models have load_weights; its annotation says only Module
        try:
            loaded: set[str] | None = model.load_weights(weights)
        except (KeyError, ValueError, RuntimeError, AssertionError) as exc:  # how vLLM's loaders refuse a tensor
            raise ActivationError(
                f"{type(model).__name__} cannot load the version: {type(exc).__name__}: {exc}",
                version=version,
                phase="activate",
            ) from exc
        # Loaders that do not report what they loaded return None; quantised models add parameters of their own.
        if loaded is not None and self.vllm_config.model_config.quantization is None:
            missing = sorted(self._expected - loaded)
            if missing:
                raise ActivationError(
                    f"{len(missing)} parameters of {type(model).__name__} are not among the weights: "
                    f"{', '.join(missing)}",
                    version=version,
                    phase="activate",
                )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._reading.close()
        for layer in self._tied:
            # The reload processes the layer that a tensor is loaded into. What the other one derived from the shared
            # parameter (on CPU: a packed copy for its matrix product) would keep the previous version's values.
            quant_method = getattr(layer, "quant_method", None)
            if isinstance(quant_method, QuantizeMethodBase):
                quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        self._reading.close()


def tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers with a parameter that an earlier layer of `model` has, too: an output projection tied to embeddings."""
    owned: set[int] = set()
    tied = []
    for layer in model.modules():
        parameters = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if parameters & owned:
            tied.append(layer)
        owned |= parameters
    return tied
