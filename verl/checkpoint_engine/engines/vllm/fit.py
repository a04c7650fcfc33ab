"""Check that a checkpoint fits the model that a vLLM worker serves, without moving a byte.

vLLM's own loaders decide: the worker builds a second model on the meta device, where tensors have shapes and no memory,
and loads tensors with the checkpoint's names and shapes into it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
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

from ...compat.torch import TorchDispatchMode, changed_by, storage_of, tensors_in
from ...compat.vllm import know_own_experts, load_numel, own_rotary_tables
from ...errors import ActivationError
from .build import Weights, quantizes_online, standing_alone, without_quantization
from .check import digest_of

logger = logging.getLogger(__name__)

TensorShapes = Mapping[str, tuple[str, list[int]]]
"""Tensor name to (dtype by torch's name, shape), for a checkpoint."""
REFUSALS = (KeyError, ValueError, RuntimeError, AssertionError, IndexError, AttributeError, TypeError)
"""Errors with which vLLM's loaders refuse a tensor."""


MADE_ANEW = re.compile(r"(^|\.)(inv_freq|cos_cached|sin_cached|masked_bias)$|(attn|attention)\.bias$")
"""Buffers that layers compute from their configuration: rotary tables, and causal masks of older models."""
FOR_NO_TEXT = re.compile(r"(^|\.)(mtp|mtp_layers|visual|vision\w*|audio\w*|multi_modal_projector|mm_projector)\.")
"""Layers that a text model does not need: multi-token prediction, vision and audio."""
MASK_DIM = 4


@dataclass(frozen=True)
class Fit:
    """How a checkpoint's tensors fit the model of one worker, or of all workers."""

    kind: str = ""
    """Class of the model."""
    problems: tuple[str, ...] = ()
    """Missing, unknown and misshapen tensors, one sentence each."""
    left_out: frozenset[str] = frozenset()
    """Tensors that the loaders skip silently."""
    embeddings: frozenset[str] = frozenset()
    """Tensors that fill vocabulary matrices."""
    unknown: str = ""
    """Why the fit could not be found out; empty if it was."""

    def together(self, others: Iterable[Fit]) -> Fit:
        """The fit of all workers, which may have different layers and experts."""
        fits = [self, *others]
        if not_known := next((fit.unknown for fit in fits if fit.unknown), ""):
            return Fit(unknown=not_known)
        return Fit(
            self.kind,
            tuple(dict.fromkeys(problem for fit in fits for problem in fit.problems)),
            self.left_out.intersection(*(fit.left_out for fit in fits)),
            self.embeddings.union(*(fit.embeddings for fit in fits)),
        )

    def copies(self, tensors: TensorShapes) -> dict[str, str]:
        """Each left-out tensor with the twin that the model uses instead: a head with its tied embedding. Leaving it
        out is right if both have equal values."""
        return {
            name: next(twin for twin in sorted(self.embeddings) if tensors[name] == tensors[twin])
            for name in sorted(self.left_out)
            if any(tensors[name] == tensors[twin] for twin in self.embeddings)
        }

    def require(self, tensors: TensorShapes) -> None:
        """Raises ActivationError listing all problems, and all left-out tensors without a twin."""
        if self.unknown:
            raise ActivationError(f"cannot find out whether the checkpoint fits the engine's model: {self.unknown}")
        lost = sorted(self.left_out - self.copies(tensors).keys())
        problems = [*self.problems, *(f"{name} {tensors[name][1]} is left out, also from disk" for name in lost)]
        if problems:
            raise ActivationError(
                f"the checkpoint does not fit the engine's {self.kind}, {len(problems)} problems: "
                + "; ".join(problems)
            )


def fit_of(vllm_config: Any, tensors: TensorShapes) -> Fit:
    """How `tensors` fit this worker's model. Never raises: other workers may wait in a collective for the answer."""
    try:
        with _trial(vllm_config) as trial:
            problems = trial.load_all(tensors)
            fit = Fit(trial.kind, tuple(problems), trial.left_out(tensors), trial.embeddings)
    except Exception as exc:  # whatever vLLM's layers raise where they have no memory
        logger.warning("cannot find out which tensors vLLM's loader leaves out", exc_info=True)
        return Fit(unknown=f"{type(exc).__name__}: {exc}")
    if vllm_config.model_config.quantization is None or quantizes_online(vllm_config):
        return fit
    return replace(fit, left_out=frozenset(fit.copies(tensors)))  # of quantised checkpoints loaders read what they need


class Seen:
    """Records shapes, and digests of possible twins, of tensors that pass only once."""

    def __init__(self, vocab_size: int, before: Set[str] | None) -> None:
        """`before`: the tensors that needed a digest in the previous update; None if there was none."""
        self._vocab_size, self._before = vocab_size, before
        self.shapes: dict[str, tuple[str, list[int]]] = {}
        self._digests: dict[str, object] = {}

    def noting(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.shapes[name] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            is_vocabulary = tensor.dim() == 2 and tensor.shape[0] >= self._vocab_size
            if is_vocabulary if self._before is None else name in self._before:
                self._digests[name] = digest_of(tensor)
            yield name, tensor

    def digests(self, sought: Set[str]) -> Mapping[str, object]:
        """The recorded digests. Raises ActivationError if a tensor of `sought` has none."""
        if unseen := sorted(sought - self._digests.keys()):
            raise ActivationError(f"the update before had no such {', '.join(unseen)}: update again to compare them")
        return self._digests


def require_equal_copies(copies: Mapping[str, str], digests: Mapping[str, object], version: int | None = None) -> None:
    """Raises ActivationError if a tensor of `copies` and its twin have different `digests`."""
    for name, twin in copies.items():
        if digests[name] != digests[twin]:
            raise ActivationError(
                f"the engine computes with {twin} in the place of {name}, and they differ: its config has "
                "tie_word_embeddings=true, and the weights have a head of their own. Serve a model whose config has "
                "tie_word_embeddings=false",
                version=version,
                phase="activate",
            )


def names_kept_wide(vllm_config: Any, tensors: TensorShapes) -> list[str]:
    """The `tensors` of parameters that a narrower model keeps in float32: mostly routers."""
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


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]


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
    """Some layers name the device of their tensors themselves. What is one parameter stays one."""
    put: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                _, on_meta = put.setdefault(id(parameter), (parameter, to_meta_tensor(parameter)))
                setattr(module, name, on_meta)
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to("meta"))


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a load: which of `tensors`, that have no memory, were written into something, as they are or changed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._within = {storage_of(tensor): (tensor, {name}) for name, tensor in tensors.items()}
        """What is in a storage, kept so that no other takes its place."""

    def of(self, values: Any) -> set[str]:
        """Which are in the tensors among `values`."""
        found = (
            self._within[storage_of(tensor)][1] for tensor in tensors_in(values) if storage_of(tensor) in self._within
        )
        return set().union(*found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, changed = self.of((args, kwargs)), list(changed_by(func, args, kwargs))
        if given and changed:
            self.names |= given
            if not all(tensor.is_meta for tensor in changed):
                return changed[0]  # of a parameter that the model has given itself just now; there are no values for it
        result = func(*args, **kwargs)
        if not changed:
            for made in tensors_in(result) if given else ():
                self._within.setdefault(storage_of(made), (made, given))
        return result


class _Trial:
    """One model on the meta device, whose loaders note what arrives."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model = model
        self._plain = vllm_config.model_config.quantization is None
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._current = self._towards = ""
        """Tensor that is loaded, and the parameter whose loader has it."""
        self._shapes: dict[str, list[int]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._reads = _Reads({})
        self.kind = type(model).__name__
        self.wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32]
        """Parameters in float32."""
        self.wide_buffers = {
            (_last_part(name), *buffer.shape) for name, buffer in model.named_buffers() if buffer.dtype == torch.float32
        }
        """Buffers in float32: the last part of a name, and a shape."""
        self.sources: dict[str, set[str]] = defaultdict(set)
        """By parameter: the checkpoint's tensors that its loader was given."""
        self._refused: set[str] = set()
        config = vllm_config.model_config.hf_text_config
        self._num_layers = int(getattr(config, "num_hidden_layers", 0))
        self._num_guessing = int(getattr(config, "num_nextn_predict_layers", 0) or 0)
        self._misshapen: dict[str, str] = {}
        self._vocabularies: list[str] = []
        self._expert_numel: dict[str, int] = {}
        self._copied_numel: dict[str, int] = defaultdict(int)
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                sized = self._plain and isinstance(module, LinearBase)
                # A vocabulary's matrix is padded for all ranks together; its own loader knows how many rows there are.
                whole = self._plain and not isinstance(module, (LinearBase, RoutedExperts, VocabParallelEmbedding))
                full_name = f"{prefix}.{name}" if prefix else name
                self._shapes[full_name], self._dtypes[full_name] = list(parameter.shape), parameter.dtype
                if isinstance(module, VocabParallelEmbedding):
                    self._vocabularies.append(full_name)
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
        refused = self._refused
        with _Reads(weights) as self._reads:
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
                        place = f" by {self._place_in(self._towards)}" if self._towards else ""
                        told = f"{type(exc).__name__}: {refusal}"
                        problems.append(f"{name} {list(tensor.shape)} is refused{place} ({told})")
        problems += [*self._misshapen.values(), *(self._mistaken(tensors) if self._plain else ())]
        problems += [
            f"some experts of {name} are missing"
            for name, numel in self._expert_numel.items()
            if 0 < self._copied_numel[name] < numel
        ]
        taken = refused.union(self._reads.names, *self.sources.values())
        strange = [name for name in self._experts_here(weights) if name not in taken]
        problems += [f"{name} is of no expert of the model" for name in strange]
        refused.update(strange)
        if loaded is not None and self._plain:
            problems += [f"{name} is missing" for name in self._missing(loaded)]
        return problems

    def _mistaken(self, tensors: TensorShapes) -> Iterator[str]:
        """Loaders cast: quantized integers would become weights without their scale, and fractions would be cut."""
        for parameter, names in self.sources.items():
            for name in sorted(names & tensors.keys()):
                dtype, shape = tensors[name]
                if getattr(torch, dtype).is_floating_point != self._dtypes[parameter].is_floating_point:
                    own = str(self._dtypes[parameter]).removeprefix("torch.")
                    yield f"{name} {shape} is {dtype}, and its place in {self._place_in(parameter)} is {own}"

    def left_out(self, tensors: TensorShapes) -> frozenset[str]:
        """Tensors that the model neither loaded nor refused, except those that it computes itself or that text does not
        need. A layer that loaded one of its tensors is a layer of the model."""
        taken = self._refused.union(self._reads.names, *self.sources.values())
        layers = {_layer_of(name) for name in taken}
        return frozenset(name for name in tensors.keys() - taken if self._matters(name, tensors[name][1], layers))

    def _matters(self, name: str, shape: list[int], layers: Set[str]) -> bool:
        made = MADE_ANEW.search(name) is not None and (name.rpartition(".")[2] != "bias" or len(shape) == MASK_DIM)
        layer = re.search(r"\.layers\.(\d+)\.", name)
        guesses = layer is not None and self._num_layers <= int(layer[1]) < self._num_layers + self._num_guessing
        return not (made or guesses or (FOR_NO_TEXT.search(name) and _layer_of(name) not in layers))

    @property
    def embeddings(self) -> frozenset[str]:
        """Tensors that have filled matrices of the vocabulary."""
        return frozenset().union(*(self.sources[name] for name in self._vocabularies if name in self.sources))

    def _experts_here(self, names: Iterable[str]) -> Iterator[str]:
        """Those of `names` that are experts' in layers of this pipeline stage.

        vLLM's loaders skip an expert beyond the last one without a word, as they do layers of other stages.
        """
        stacks = {parameter.partition(".experts.")[0] for parameter in self._expert_numel}
        return (name for name in names if ".experts." in name and name.partition(".experts.")[0] in stacks)

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._current, self._towards = name, ""
            yield name, tensor

    def _place_in(self, parameter_name: str) -> str:
        """With its shape, of this rank's part."""
        part = "" if self._ranks == 1 else f" on each of {self._ranks} ranks"
        return f"{parameter_name} {self._shapes[parameter_name]}{part}"

    def _noting(
        self, parameter_name: str, loader: Callable[..., Any], *, sized: bool, most: int | None
    ) -> Callable[..., Any]:
        """`most`: elements of a parameter that one tensor fills, or a rank's share of one."""
        signature = inspect.signature(loader)

        def noting(*arguments: Any, **named: Any) -> Any:
            self._towards = parameter_name
            self.sources[parameter_name] |= self._reads.of((arguments, named)) or {self._current}
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
            place = self._place_in(parameter_name)
            self._misshapen[self._current] = (
                f"{self._current} {list(tensor.shape)} has another shape than its place in {place}"
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
