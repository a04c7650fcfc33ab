"""Whether a checkpoint fits the model that a vLLM worker serves, found out without moving a byte of it.

vLLM's own loaders decide: the worker builds its model a second time, on the meta device, where tensors have shapes and
no memory, and loads the checkpoint's names and shapes into that.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded, to_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from ...compat.vllm import know_own_experts, load_numel, own_rotary_tables
from ...errors import ActivationError
from .build import quantizes_online, standing_alone, without_quantization

TensorShapes = Mapping[str, tuple[str, list[int]]]
"""dtype (torch's name) and shape of every tensor of a checkpoint."""
REFUSALS = (KeyError, ValueError, RuntimeError, AssertionError, IndexError, AttributeError, TypeError)
"""How vLLM's loaders refuse a tensor."""


def require_fit(vllm_config: Any, tensors: TensorShapes) -> None:
    """Raises ActivationError that lists every tensor that the model lacks, does not know, or has in another shape."""
    with _trial(vllm_config) as trial:
        problems = trial.load_all(tensors)
    if problems:
        raise ActivationError(
            f"the checkpoint does not fit the engine's {trial.kind}, {len(problems)} problems: " + "; ".join(problems)
        )


def names_kept_wide(vllm_config: Any, tensors: TensorShapes) -> list[str]:
    """Those of `tensors` that fill parameters which the model has in float32 among narrower ones: routers, mostly."""
    if vllm_config.model_config.dtype.itemsize >= torch.float32.itemsize:
        return []
    with _trial(vllm_config) as trial:
        # Nobody sees which tensor fills a buffer; one that is kept wide for nothing is rounded by the engine.
        found = {name for name, (_, shape) in tensors.items() if (_last_part(name), *shape) in trial.wide_buffers}
        if trial.wide:
            trial.load_all(tensors)
    return sorted(found.union(*(trial.sources[name] for name in trial.wide)))


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


@contextlib.contextmanager
def _trial(vllm_config: Any) -> Iterator[_Trial]:
    # Quantizing needs values, and asks nothing else of a checkpoint than the plain model does.
    plain = without_quantization(vllm_config) if quantizes_online(vllm_config) else vllm_config
    with set_default_torch_dtype(vllm_config.model_config.dtype):
        try:
            model, alone = _built(plain, "meta")
        except RuntimeError:
            # A layer computes with values while it is built, as Gemma 3n's sparse activations do. Memory of the host
            # that nobody writes into is none, and if it is something else, that is raised again.
            model, alone = _built(plain, "cpu")
        _put_on_meta(model)
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                know_own_experts(module)
        with torch.device("meta"), set_current_vllm_config(alone):
            yield _Trial(model, alone)


def _built(vllm_config: Any, device: str) -> tuple[Any, Any]:
    """The model, and the configuration that its layers have entered themselves into. Nothing of it is the live one's:
    that would lose its memory when this one is put on the meta device."""
    alone = standing_alone(vllm_config)
    with torch.device(device), own_rotary_tables():
        return initialize_model(alone), alone


def _put_on_meta(model: torch.nn.Module) -> None:
    """Some layers name the device of their tensors themselves."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                setattr(module, name, to_meta_tensor(parameter))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to("meta"))


class _Trial:
    """One model on the meta device, whose loaders note what arrives."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model = model
        self._plain = vllm_config.model_config.quantization is None
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._current = ""
        self.kind = type(model).__name__
        self.wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32]
        """Parameters in float32."""
        self.wide_buffers = {
            (_last_part(name), *buffer.shape) for name, buffer in model.named_buffers() if buffer.dtype == torch.float32
        }
        """Buffers in float32: the last part of a name, and a shape."""
        self.sources: dict[str, set[str]] = defaultdict(set)
        """By parameter: the checkpoint's tensors that its loader was given."""
        self._misshapen: dict[str, str] = {}
        self._expert_numel: dict[str, int] = {}
        self._copied_numel: dict[str, int] = defaultdict(int)
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                sized = self._plain and isinstance(module, LinearBase)
                # A vocabulary's matrix is padded for all ranks together; its own loader knows how many rows there are.
                whole = self._plain and not isinstance(module, (LinearBase, RoutedExperts, VocabParallelEmbedding))
                full_name = f"{prefix}.{name}" if prefix else name
                if isinstance(module, RoutedExperts):
                    self._expert_numel[full_name] = load_numel(parameter)
                parameter.weight_loader = self._noting(
                    full_name, loader, sized=sized, most=parameter.numel() if whole else None
                )

    def load_all(self, tensors: TensorShapes) -> list[str]:
        """What is wrong with the checkpoint; empty if nothing."""
        weights = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in tensors.items()
        }
        problems = []
        refused: set[str] = set()
        try:
            loaded: set[str] | None = self._model.load_weights(self._named(weights.items()))
        except REFUSALS:
            loaded = set()
            for name, tensor in weights.items():  # one by one, to tell all that are refused
                try:
                    loaded |= self._model.load_weights(self._named([(name, tensor)])) or set()
                except REFUSALS as exc:
                    refused.add(name)
                    refusal = " ".join(str(exc).split())[:200]
                    problems.append(f"{name} {list(tensor.shape)} is refused ({type(exc).__name__}: {refusal})")
        problems += self._misshapen.values()
        problems += [
            f"some experts of {name} are missing"
            for name, numel in self._expert_numel.items()
            if 0 < self._copied_numel[name] < numel
        ]
        taken = refused.union(*self.sources.values())
        problems += [
            f"{name} is of no expert of the model" for name in self._experts_here(weights) if name not in taken
        ]
        if loaded is not None and self._plain:
            problems += [f"{name} is missing" for name in self._missing(loaded)]
        return problems

    def _experts_here(self, names: Iterable[str]) -> Iterator[str]:
        """Those of `names` that are experts' in layers of this pipeline stage.

        vLLM's loaders skip an expert beyond the last one without a word, as they do layers of other stages.
        """
        stacks = {parameter.partition(".experts.")[0] for parameter in self._expert_numel}
        return (name for name in names if ".experts." in name and name.partition(".experts.")[0] in stacks)

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._current = name
            yield name, tensor

    def _noting(
        self, parameter_name: str, loader: Callable[..., Any], *, sized: bool, most: int | None
    ) -> Callable[..., Any]:
        """`most`: elements of a parameter that one tensor fills, or a rank's share of one."""
        signature = inspect.signature(loader)

        def noting(*arguments: Any, **named: Any) -> Any:
            self.sources[parameter_name].add(self._current)
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            copied, answer = get_numel_loaded(loader, bound)
            self._copied_numel[parameter_name] += copied
            tensor = bound.arguments.get("loaded_weight")
            if most and isinstance(tensor, torch.Tensor) and tensor.numel() > most:
                self._check_size(parameter_name, tensor, most)
            if sized:
                self._check_size(parameter_name, bound.arguments["loaded_weight"], copied)
            return answer

        return noting

    def _check_size(self, parameter_name: str, tensor: torch.Tensor, copied: int) -> None:
        """Loaders take a rank's slice of a tensor that is too large without a word."""
        shares = tensor.numel() / copied if copied else 0
        if shares < 1 or self._ranks % shares != 0:
            self._misshapen[self._current] = (
                f"{self._current} {list(tensor.shape)} has another shape than its place in {parameter_name}"
            )

    def _missing(self, loaded: set[str]) -> list[str]:
        packed: Mapping[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        missing = []
        for name, _ in self._model.named_parameters():
            fused = next((part for part in name.split(".") if len(packed.get(part, ())) > 1), None)
            given = {component for source in self.sources[name] for component in source.split(".")}
            if fused is None:
                missing += [name] if name not in loaded and not given else []
            elif fused not in given:  # a checkpoint may have it fused already
                missing += [name.replace(f".{fused}.", f".{part}.") for part in packed[fused] if part not in given]
        return missing
