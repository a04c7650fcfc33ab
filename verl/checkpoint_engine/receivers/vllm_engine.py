"""The vLLM side of a sync: a weight-transfer engine that loads a version from a node arena or a ParameterServer.

Runs inside every vLLM worker (one per tensor-parallel rank), with or without a trainer of ours. The update request is
`{"arena_path": str, "version": int}`, the bytes being on this host already, or `{"socket_paths": {device id: path}}`,
where a ParameterServer hands them over bucket by bucket. Each rank maps the memory and feeds views of it to the model's
own `load_weights` inside vLLM's layerwise reload: a rank copies only its slice of a tensor, and vLLM's post-processing
of fused, packed and quantised layouts runs as for a checkpoint from disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from verl.checkpoint_engine.arena import open_committed
from verl.checkpoint_engine.errors import ActivationError, TransportError
from verl.checkpoint_engine.parameter_server.devices import device_id
from verl.checkpoint_engine.parameter_server.engine_receiver import IncomingWeights
from verl.checkpoint_engine.receivers.vllm_fit import require_fit


@dataclass
class ArenaInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand: every update names its source."""

    tensors: dict[str, tuple[str, list[int]]] | None = None
    """If given: dtype and shape of every tensor that an update will bring, to be refused now if they do not fit."""


@dataclass
class ArenaUpdateInfo(WeightTransferUpdateInfo):
    """Which version of which arena to load, or where ParameterServers have it ready, one for each worker."""

    arena_path: str | None = None
    version: int | None = None
    socket_paths: dict[str, str] | None = None
    """By device id. On accelerators a worker takes that of its device, on CPU the one at its rank's place."""
    timeout_s: float = 600.0
    """For each wait for the ParameterServer."""

    def __post_init__(self) -> None:
        if (self.arena_path is None) == (self.socket_paths is None) or (self.arena_path and self.version is None):
            raise ValueError("an update names arena_path and version, or socket_paths")


class ArenaWeightTransferEngine(WeightTransferEngine[ArenaInitInfo, ArenaUpdateInfo]):
    """One per vLLM worker. Called by vLLM on its worker thread: start, receive once, finish."""

    init_info_cls = ArenaInitInfo
    update_info_cls = ArenaUpdateInfo

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = ExitStack()
        self._reloading = False
        self._expected: set[str] = set()
        self._tied: list[torch.nn.Module] = []
        self._expert_kernels: list[tuple[Any, Any]] = []

    def init_transfer_engine(self, init_info: ArenaInitInfo) -> None:
        """Raises ActivationError if `tensors` do not fit the model."""
        # One rank speaks for all, whose models are alike; the last one, for the reason that `_raise_on_last` gives.
        if init_info.tensors is not None and self._rank == self.parallel_config.world_size - 1:
            require_fit(self.vllm_config, init_info.tensors)

    def start_weight_update(self) -> None:
        # Before the reload takes the parameters apart, a tied one is one object: named once, shared by two layers.
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._tied = tied_layers(self.model)
        self._forget_expert_kernels()
        initialize_layerwise_reload(self.model)
        self._reloading = True

    def _forget_expert_kernels(self) -> None:
        """Have vLLM prepare experts for its CPU kernel again, which it does for a layer that has no kernel yet.

        For one that has, it only copies what was loaded: right on accelerators, whose graphs hold addresses. On CPU the
        kernel reads a packed form, and packing is a part of making it.
        """
        if self.device.type != "cpu":
            return
        methods = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        plain = [method for method in methods if isinstance(method, UnquantizedFusedMoEMethod)]
        self._expert_kernels = [(method, method.moe_kernel) for method in plain]
        for method in plain:
            method.moe_kernel = None

    def receive_weights(self, update_info: ArenaUpdateInfo) -> None:
        """Load every weight of the version. The reload is closed even when loading fails, so that another can begin.

        A caller that gets an error calls `finish_weight_update`, too: of several ranks, one alone raises.

        Raises ActivationError if the model has parameters that the version does not bring, naming all of them, or the
        version has tensors that the model does not know; IntegrityError if the arena's committed version is another;
        TransportError if the ParameterServer is gone, silent or gave up.
        """
        failure: Exception | None = None
        try:
            self._receive(update_info)
        except Exception as exc:  # noqa: BLE001 - raised below, on one of the ranks
            failure = exc
            self.finish_weight_update()
        self._raise_on_last(failure)

    def _receive(self, update_info: ArenaUpdateInfo) -> None:
        if update_info.socket_paths is not None:
            path = self._own_socket(update_info.socket_paths)
            with IncomingWeights(path, self.device, update_info.timeout_s) as incoming:
                self._load(incoming.tensors(), None)
        elif update_info.arena_path is not None and update_info.version is not None:
            # Layers that vLLM completes only in `finish` still read the views: the version stays mapped until then.
            _, slot = self._reading.enter_context(open_committed(update_info.arena_path, update_info.version))
            self._load(slot.tensors(), update_info.version)

    @property
    def _rank(self) -> int:
        """Of this worker in its engine."""
        return self.parallel_config.rank

    def _own_socket(self, socket_paths: dict[str, str]) -> str:
        """Device ids of CPU ranks count over all engines; a caller names each engine those that feed it, in order."""
        key = device_id(self.device, self._rank)
        if self.device.type == "cpu":
            key = next(islice(socket_paths, self._rank, None), key)
        if key not in socket_paths:
            raise TransportError(
                f"no ParameterServer feeds worker {self._rank} on {self.device}: there are {', '.join(socket_paths)}"
            )
        return socket_paths[key]

    def _raise_on_last(self, failure: Exception | None) -> None:
        """Raise what failed on any rank, on the last one alone.

        vLLM's executor reads the ranks' answers in order and stops at an error: the unread answers of later ranks would
        be taken for those to its next call, and so on for ever.
        """
        world = get_world_group()
        if world.world_size == 1:
            if failure is not None:
                raise failure
            return
        failures: list[str | None] = [None] * world.world_size
        mine = f"{type(failure).__name__}: {failure}" if failure is not None else None
        torch.distributed.all_gather_object(failures, mine, group=world.cpu_group)
        told = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
        if told and world.rank_in_group == world.world_size - 1:
            raise ActivationError("; ".join(told)) from failure

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]], version: int | None) -> None:
        model: Any = self.model  # vLLM's models have load_weights; its annotation says only Module
        try:
            loaded: set[str] | None = model.load_weights(weights)
        except (KeyError, ValueError, RuntimeError, AssertionError) as exc:  # how vLLM's loaders refuse a tensor
            raise ActivationError(
                f"{type(model).__name__} cannot load the version: {type(exc).__name__}: {exc}",
                version=version,
                phase="activate",
            ) from exc
        if partial := [name for name, layer in model.named_modules() if _has_more_to_load(layer)]:
            raise ActivationError(
                f"some experts of {type(model).__name__} are not among the weights: {', '.join(partial)}",
                version=version,
                phase="activate",
            )
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
        """Idempotent."""
        if not self._reloading:
            return
        self._reloading = False
        finalize_layerwise_reload(self.model, self.model_config)
        self._reading.close()
        for method, kernel in self._expert_kernels:
            if method.moe_kernel is None:  # nothing was loaded into the layer: it has the weights that it had
                method.moe_kernel = kernel
        for layer in self._tied:
            # The reload processes the layer that a tensor is loaded into. What the other one derived from the shared
            # parameter (on CPU: a packed copy for its matrix product) would keep the previous version's values.
            quant_method = getattr(layer, "quant_method", None)
            if isinstance(quant_method, QuantizeMethodBase):
                quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        self._reading.close()


def _has_more_to_load(layer: torch.nn.Module) -> bool:
    """Some of its experts' matrices have come, and some have not; what `load_weights` reports has one name for all."""
    if not isinstance(layer, RoutedExperts):
        return False
    info = get_layerwise_info(layer)
    return info.can_load() and info.load_numel > 0


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
