"""Load a version into the live model: through vLLM's layerwise reload, or, for some models, as a second model.

The reload calls the loaders of parameters. A model that writes to a parameter without its loader writes to no memory:
the reload has replaced the parameter with a tensor on the meta device. For such a model vLLM builds a second one as
from disk, whose layers replace the live ones. That is slower, and needs the memory of a second model meanwhile.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from ...compat.torch import children
from ...errors import ActivationError
from .build import quantizes_online
from .live import STATE
from .unchanged import Kept, Sources

NOTING = "notes_loading"
REFUSALS = (KeyError, ValueError, RuntimeError, AssertionError)
"""Errors with which vLLM's loaders refuse a tensor."""


def _born_as(layer: torch.nn.Module, name: str, parameter: torch.Tensor) -> torch.dtype:
    """The dtype that a parameter has in a model that has just been built.

    Kernels for AMX widen biases afterwards, which the reload takes for what they were: a wider value would then not be
    rounded as it is from disk. Other wide parameters of a layer are meant so, as the bias that chooses experts.
    """
    is_wide_bias = name == "bias" and parameter.dtype == torch.float32
    if is_wide_bias and isinstance(layer, LinearBase) and layer.quant_config is None:
        dtype: torch.dtype = layer.params_dtype
        return dtype
    return parameter.dtype


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class ReloadFailed(ActivationError):
    """The model's own loaders raised an error in a reload. A newly built model may load without one."""


class Reload:
    """One layerwise reload of `model`. Call `load` once, then `end`, even if the load has failed."""

    def __init__(self, model: Any, vllm_config: VllmConfig, kept: Kept | None = None) -> None:
        """`kept`: layers that are not loaded; `load` gets no tensors of theirs."""
        self._model = model
        self._vllm_config = vllm_config
        self._kept = kept or Kept()
        self.sources = Sources()
        """The tensors that fill each layer."""
        self._written: set[str] = set()
        # Before the reload takes the parameters apart, a tied one is one object: named once, shared by two layers.
        self._expected = {name for name, _ in model.named_parameters()} & set(_checkpoint_parameters(model))
        self._expected = {name for name in self._expected if name.rpartition(".")[0] not in self._kept.layers}
        self._tied = tied_layers(model)
        self._expert_kernels = _forget_expert_kernels(model) if vllm_config.device_config.device_type == "cpu" else []
        _name_loaders(model)
        initialize_layerwise_reload(model)
        for prefix, layer in model.named_modules():
            for name, parameter in _parameters(layer).items():
                self._note_loading(prefix, name, parameter, _born_as(layer, name, parameter))

    def _note_loading(self, layer: str, own_name: str, parameter: Any, born_as: torch.dtype) -> None:
        name = f"{layer}.{own_name}" if layer else own_name
        loader: Callable[..., Any] = getattr(parameter, "weight_loader", default_weight_loader)

        @functools.wraps(loader)  # its name, too: by that, vLLM takes off what the reload has put around loaders
        def noting(*arguments: Any, **named: Any) -> Any:
            self._written.add(name)
            self.sources.note(layer, (*arguments[1:], *(value for key, value in named.items() if key != "param")))
            if born_as != parameter.dtype:  # the first is what is filled
                arguments = (*arguments[:1], *(_rounded(value, born_as) for value in arguments[1:]))
            return loader(*arguments, **named)

        setattr(noting, NOTING, True)
        parameter.weight_loader = noting

    @contextmanager
    def _late_parameters(self) -> Iterator[set[str]]:
        """Names of those that the model gives itself in the block, when the checkpoint turns out to have them: the
        reload takes them away again."""
        late: set[str] = set()
        known: dict[torch.nn.Module, tuple[str, set[str]]] = {}
        for prefix, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            kernel_tensors = info.kernel_tensors[0] if info.kernel_tensors else {}
            known[layer] = prefix, {*_parameters(layer), *kernel_tensors, *info.restore_metadata[0]}

        def note(layer: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
            if layer in known and parameter is not None and name not in known[layer][1]:
                late.add(f"{known[layer][0]}.{name}")

        handle = register_module_parameter_registration_hook(note)
        try:
            yield late
        finally:
            handle.remove()

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], version: int | None) -> set[str]:
        """Load `weights`, which must not change until `end`. Returns parameters that the model has loaded without the
        reload: their layers still compute with the old values.

        Raises ActivationError, naming the tensors, if the version lacks parameters of the model; ReloadFailed for
        errors of the loaders, such as an unknown tensor.
        """
        model = self._model
        try:
            with self._late_parameters() as late:
                loaded: set[str] | None = model.load_weights(self.sources.lending(weights))
        except REFUSALS as exc:
            raise ReloadFailed(
                f"{type(model).__name__} cannot load the version: {type(exc).__name__}: {exc}",
                version=version,
                phase="activate",
            ) from exc
        if partial := [name for name, layer in model.named_modules() if _has_more_to_load(layer)]:
            raise self._refused(f"does not find some experts among the weights: {', '.join(partial)}", version)
        # Loaders that do not report what they loaded return None; models of quantised checkpoints add parameters.
        if self._vllm_config.model_config.quantization is not None and not quantizes_online(self._vllm_config):
            return set()
        if loaded is not None and (missing := self._not_among(loaded)):
            left_out = self.sources.left_out()
            also = ""
            if left_out:
                also = (
                    f"; vLLM's loader of it leaves out {', '.join(left_out)}, also from disk: take another version of "
                    "vLLM, or another engine, to sample from what the checkpoint says"
                )
            raise self._refused(
                f"has {len(missing)} parameters that are not among the weights: {', '.join(missing)}{also}", version
            )
        return self._expected - self._written | late

    def _not_among(self, loaded: set[str]) -> list[str]:
        """Expected parameters that are not loaded. A layer that others hold, too, has several names. Of routed experts
        vLLM before 0.32 reports others than they have, so it counts what the loaders have written."""
        missing = sorted(self._expected - loaded)
        if not missing:
            return []
        known = {name for name, _ in self._model.named_modules()}
        found = {self._place(name) for name in loaded if name.rpartition(".")[0] not in known}
        return [name for name in missing if self._place(name) not in found and not self._has_experts(name, loaded)]

    def _has_experts(self, name: str, loaded: set[str]) -> bool:
        outer, inner, own_name = name.rpartition(".routed_experts.")
        return bool(inner) and f"{outer}.{own_name}" in loaded and name in self._written

    def _place(self, name: str) -> tuple[int, str] | None:
        """The layer of a parameter, and its name there. None if the model has no such layer."""
        prefix, _, own_name = name.rpartition(".")
        try:
            return id(self._model.get_submodule(prefix)), own_name
        except AttributeError:
            return None

    def _refused(self, text: str, version: int | None) -> ActivationError:
        return ActivationError(f"{type(self._model).__name__} {text}", version=version, phase="activate")

    def end(self) -> None:
        finish: Callable[..., None] = finalize_layerwise_reload
        try:
            with _unfilled_layers_are_meant() if self._kept.layers else nullcontext():
                finish(self._model, self._vllm_config.model_config)
        finally:
            self._stop_noting()
            self.sources.forget_places()
        for method, kernel in self._expert_kernels:
            if method.moe_kernel is None:  # nothing was loaded into the layer: it has the weights that it had
                method.moe_kernel = kernel
        for layer in self._tied:
            # The reload processes the layer that a tensor is loaded into. What the other one derived from the shared
            # parameter (on CPU: a packed copy for its matrix product) would keep the previous version's values.
            quant_method = getattr(layer, "quant_method", None)
            if isinstance(quant_method, QuantizeMethodBase):
                quant_method.process_weights_after_loading(layer)

    def _stop_noting(self) -> None:
        """Also for what the next reload begins with: or each would be around the one before, and note for all."""
        tensor: Any
        for layer in self._model.modules():
            for tensor in (*_parameters(layer).values(), *get_layerwise_info(layer).restore_metadata[0].values()):
                loader: Any = getattr(tensor, "weight_loader", None)
                if hasattr(loader, NOTING):
                    tensor.weight_loader = loader.__wrapped__


@contextmanager
def _unfilled_layers_are_meant() -> Iterator[None]:
    """vLLM warns of every layer that it leaves as it is."""
    told = logging.getLogger(finalize_layerwise_reload.__module__)

    def is_news(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    told.addFilter(is_news)
    try:
        yield
    finally:
        told.removeFilter(is_news)


def _name_loaders(model: torch.nn.Module) -> None:
    """vLLM's reload asks loaders for their names, which partial functions have not."""
    for layer in model.modules():
        tensor: Any
        for tensor in (*_parameters(layer).values(), *get_layerwise_info(layer).restore_metadata[0].values()):
            loader = getattr(tensor, "weight_loader", None)
            if loader is not None and not hasattr(loader, "__name__"):
                tensor.weight_loader = _named(loader)


def _named(loader: Callable[..., Any]) -> Callable[..., Any]:
    def weight_loader(*arguments: Any, **named: Any) -> Any:
        return loader(*arguments, **named)

    weight_loader.__signature__ = inspect.signature(loader)  # type: ignore[attr-defined]  # by that, arguments are told
    return weight_loader


def _parameters(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Its own ones, those that have a value."""
    return dict(layer.named_parameters(recurse=False, remove_duplicate=False))


def _checkpoint_parameters(model: torch.nn.Module) -> Iterator[str]:
    """Names of the parameters that the model was built with. What layers derive from them after loading is not in a
    checkpoint."""
    for prefix, layer in model.named_modules():
        built = get_layerwise_info(layer).restore_metadata[0].keys() | SKIP_TENSORS
        yield from (f"{prefix}.{name}" if prefix else name for name in _parameters(layer).keys() & built)


def _forget_expert_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Have vLLM prepare experts for its CPU kernel again, which it does for a layer that has no kernel yet.

    For one that has, it only copies what was loaded: right on accelerators, whose graphs hold addresses. On CPU the
    kernel reads a packed form, and packing is a part of making it.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    kernels = [(method, method.moe_kernel) for method in methods if isinstance(method, UnquantizedFusedMoEMethod)]
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels


def _has_more_to_load(layer: torch.nn.Module) -> bool:
    """Some of its experts' matrices have come, and some have not; what `load_weights` reports has one name for all."""
    if not isinstance(layer, RoutedExperts):
        return False
    info = get_layerwise_info(layer)
    return info.can_load() and info.load_numel > 0


def tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers that share a parameter with an earlier layer of `model`, such as a head tied to the embedding."""
    owned: set[int] = set()
    tied = []
    for layer in model.modules():
        parameters = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if parameters & owned:
            tied.append(layer)
        owned |= parameters
    return tied


def require_exchangeable(vllm_config: VllmConfig, why: str) -> None:
    """Raises ActivationError, with `why`, if compiled code holds addresses of the live model's layers."""
    compilation = vllm_config.compilation_config
    if compilation.mode not in (None, CompilationMode.NONE) or compilation.cudagraph_mode:
        raise ActivationError(
            f"{why}; a second model must replace such a model, and compiled code and graphs would keep the first one: "
            "set rollout.enforce_eager=true (vLLM: --enforce-eager)"
        )


def take_over(model: torch.nn.Module, fresh: torch.nn.Module) -> None:
    """Give the layers of `model` the state of their counterparts in `fresh`, which must not be used any more.

    Layers stay the same objects. They keep the KV cache, and attributes that the engine set after the load (on CPU the
    kernel of each attention), but no tensors that they derived from old weights.
    Raises ActivationError if the two models have different layers.
    """
    live, new = dict(model.named_modules()), dict(fresh.named_modules())
    mine = {id(new[name]): layer for name, layer in live.items() if name in new}
    below = (child for layer in new.values() for child in children(layer).values() if child is not None)
    if live.keys() != new.keys() or not all(id(child) in mine for child in below):
        raise ActivationError(f"a second {type(model).__name__} is built of other layers than the first")
    for name, layer in live.items():
        attends = isinstance(layer, AttentionLayerBase)
        for attribute, value in vars(layer).items():
            given = attribute not in vars(new[name]) and (attends or not isinstance(value, torch.Tensor))
            if given or (attends and attribute == STATE):
                new[name].__dict__[attribute] = value
        for key, child in children(new[name]).items():  # or the next version would be given to `fresh`'s alone
            children(new[name])[key] = None if child is None else mine[id(child)]
    for name, layer in live.items():
        object.__setattr__(layer, "__dict__", vars(new[name]))  # shared: whoever holds either sees the same
