"""Find every tensor that a vLLM model computes with, by name, and compare two models.

These are more than parameters and buffers: a layer's quantisation method, kernel or attention may hold packed,
transposed or fused copies of weights as plain attributes, in tuples, dicts, partial functions or closures.

Names are paths: `model.layers.0.self_attn.qkv_proj.cpu_linear<packed_weight>` is a variable in the closure of that
layer's function `cpu_linear`. A tensor with two paths has two names.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from ...compat.vllm import packed_product

STATE = "kv_cache"
"""The attribute of attention and state-space layers that holds sequences, not weights."""
LOADERS = ("weight_loader", "_weight_loader")
"""Attributes of parameters with their loader, which a reload changes."""
TRACED = re.compile(r"_tensor_constant\d+")
"""Attributes that torch.fx adds to a traced layer: constants of its code, no weights."""
PROBE_ROWS = 256
FOREIGN = (
    "torch",
    "transformers",
    "vllm.config",
    "vllm.distributed",
    "vllm.platforms",
    "logging",
    "threading",
    "numpy",
)
"""Packages whose objects are not searched: their tensors are no weights."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
UNWRITTEN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
"""The NaN with which torch fills new memory on request; it stays in elements that a load skips, such as padding."""


@dataclass(frozen=True)
class Packed:
    """Weights in oneDNN's opaque format. They are read as their product with the identity, which is exact: every
    element is the sum of one weight and zeros."""

    source: object
    """The handle that holds them."""
    multiply: Callable[[torch.Tensor], torch.Tensor]
    num_inputs: int
    num_outputs: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.num_inputs * self.num_outputs * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The weights: [inputs, outputs]."""
        rows = range(0, self.num_inputs, PROBE_ROWS)
        identity = torch.eye(self.num_inputs, dtype=self.dtype)
        return torch.cat([self.multiply(identity[row : row + PROBE_ROWS]) for row in rows])


LiveTensor = torch.Tensor | Packed


def live_tensors(model: torch.nn.Module) -> dict[str, LiveTensor]:
    """All tensors of `model` by name, borrowed: none is copied."""
    return _Walk(model).found


class _Walk:
    def __init__(self, model: torch.nn.Module) -> None:
        self.found: dict[str, LiveTensor] = {}
        self._seen: set[int] = set()
        self._dtype = torch.float32
        modules = dict(model.named_modules())
        self._seen |= {_identity(module) for module in modules.values()}  # each has a name, wherever else it is held
        for prefix, module in modules.items():
            self._module(prefix, module)

    def _module(self, prefix: str, module: torch.nn.Module) -> None:
        tensors: dict[str, Any] = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        tensors |= module.named_buffers(recurse=False, remove_duplicate=False)
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            self._dtype = weight.dtype
        attributes = {
            name: value
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules")
            and not TRACED.fullmatch(name)
            and not (name == STATE and isinstance(module, AttentionLayerBase))
        }
        # Sorted: what was set again comes last in the dict, and names depend on who is met first.
        for name, value in sorted({**attributes, **tensors}.items()):
            self._visit(f"{prefix}.{name}" if prefix else name, value)

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.found[path] = value.detach()
            self._children(path, {name: part for name, part in vars(value).items() if name not in LOADERS})
        elif value is not None and not isinstance(value, (str, bytes, int, float, type, types.ModuleType, Enum)):
            if _identity(value) in self._seen:
                return
            self._seen.add(_identity(value))
            packed = _packed(value, self._dtype)
            if packed is not None:
                self.found[path] = packed
            elif isinstance(value, torch.nn.Module):  # of no parent
                for name, module in value.named_modules():
                    self._seen.add(_identity(module))
                    self._module(f"{path}.{name}" if name else path, module)
            else:
                for name, child in _parts(value):
                    self._visit(f"{path}{name}", child)

    def _children(self, path: str, attributes: Mapping[str, Any]) -> None:
        for name, value in sorted(attributes.items()):
            self._visit(f"{path}.{name}", value)


def _identity(value: Any) -> int:
    """The same for layers that share their state: one has taken the other's over."""
    return id(vars(value)) if isinstance(value, torch.nn.Module) else id(value)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What `value` holds, with the text that leads from its name to that of the part."""
    if isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()) if not isinstance(key, torch.nn.Module))
    elif isinstance(value, functools.partial):
        yield from ((f"({index})", part) for index, part in enumerate(value.args))
        yield from ((f"({name})", part) for name, part in value.keywords.items())
        yield "", value.func
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"<{name}>", cell.cell_contents
            except ValueError:  # an empty cell
                continue
        yield from ((f"({name})", part) for name, part in (value.__kwdefaults__ or {}).items())
        yield from ((f"({index})", part) for index, part in enumerate(value.__defaults__ or ()))
    elif not _is_foreign(type(value)):
        slots = {name for one in type(value).__mro__ for name in _names(getattr(one, "__slots__", ()))}
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
        yield from (
            (f".{name}", part) for name, part in sorted(held.items()) if name not in ("__dict__", "__weakref__")
        )


def _names(slots: str | tuple[str, ...]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_foreign(kind: type) -> bool:
    module = kind.__module__
    return module == "builtins" or any(module == name or module.startswith(f"{name}.") for name in FOREIGN)


def _packed(value: Any, dtype: torch.dtype) -> Packed | None:
    """`value` as packed weights of a layer, if that is what it is: vLLM's handle of a oneDNN matrix product."""
    product = packed_product(value)
    if product is None:
        return None
    return Packed(value, product.multiply, product.num_inputs, product.num_outputs, dtype)


def differences(found: Mapping[str, LiveTensor], expected: Mapping[str, LiveTensor]) -> dict[str, str]:
    """Tensor name to its difference in words, for every tensor that is not equal bit for bit."""
    different = dict.fromkeys(expected.keys() - found.keys(), "is not there")
    different |= dict.fromkeys(found.keys() - expected.keys(), "is not in a model loaded from disk")
    same: dict[tuple[Any, ...], str | None] = {}
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        key = (_place(one), _place(other))
        if key not in same:
            same[key] = _difference(one, other)
        if (text := same[key]) is not None:
            different[name] = text
    return dict(sorted(different.items()))


def _place(tensor: LiveTensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements of the same memory."""
    if isinstance(tensor, Packed):
        return (id(tensor.source),)
    return tensor.data_ptr() or id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _difference(one: LiveTensor, other: LiveTensor) -> str | None:
    if isinstance(one, Packed) or isinstance(other, Packed):
        if not (isinstance(one, Packed) and isinstance(other, Packed)):
            return "is packed in one of them"
        one, other = one.read(), other.read()
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"is {_kind(one)} instead of {_kind(other)}"
    if one.is_meta or other.is_meta:
        return None if one.is_meta and other.is_meta else "has no memory in one of them"
    bits, expected = as_integers(one), as_integers(other.to(one.device))
    different = bits != expected
    if other.dtype in UNWRITTEN:
        different &= expected != UNWRITTEN[other.dtype]
    unequal = int(different.sum())
    return f"{unequal} of {one.numel()} elements differ" if unequal else None


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the elements of `tensor` as integers; a copy unless it is contiguous."""
    if tensor.dtype == torch.bool:
        return tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
