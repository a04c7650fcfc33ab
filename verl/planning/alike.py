"""Layers of a model whose tensors are alike: two of each kind are converted, and stand for the others.

A trillion parameters are 70,000 tensors in 61 layers of two kinds. If the checkpoint's tensors of two layers differ in
the layer's number alone, those of the layers between them follow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from verl.workers.hf.conversion import Conversion, first_names
from verl.workers.hf.rearranged import Piece


class NotAlike(Exception):
    """Layers are alike in the model, but not in its checkpoint."""


@dataclass(frozen=True)
class _Kind:
    """Layers `prefix + number` of a model with equal modules and tensors."""

    prefix: str
    """Such as `model.layers.`"""
    numbers: tuple[int, ...]
    """Ascending. A thinned model has the first and the last of them."""
    tensors: tuple[str, ...]
    """The names of a layer's tensors in it."""


@dataclass(frozen=True)
class Thinned:
    """What a model had before layers were taken from it."""

    tensors: tuple[str, ...]
    """Its tensors, in order."""
    kinds: tuple[_Kind, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Thinned:
        """Remove all but the first and the last layer of each kind from `model`."""
        tensors, kinds = tuple(model.state_dict()), []
        tied = {name for pair in first_names(model).items() for name in pair}
        for prefix, layers in list(_outermost_lists(model)):
            if any(name.startswith(prefix) for name in tied):
                continue
            for kind in _kinds(prefix, layers):
                kinds.append(kind)
                for number in kind.numbers[1:-1]:
                    delattr(layers, str(number))  # `del layers[number]` would renumber those behind it
        return cls(tensors, tuple(kinds))

    def names(self, conversion: Conversion) -> dict[str, str]:
        """The whole model's checkpoint: its tensors in order, and for each the one of `conversion` that it is like.

        `conversion` is of the thinned model. Raises NotAlike.
        """
        removed = {target: made for kind in self.kinds for target, made in _removed(kind, conversion)}
        found: dict[str, str] = {}
        for target in self.tensors:
            made = removed.get(target)
            if made is None:
                made = [(piece.origin, piece.origin) for piece in conversion.pieces.get(target, ())]
            for name, like in made:
                if found.setdefault(name, like) != like:
                    raise NotAlike(f"{name} is both like {like} and {found[name]}")
        return found


def _outermost_lists(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield f"{prefix}{name}.", child
        else:
            yield from _outermost_lists(child, f"{prefix}{name}.")


def _kinds(prefix: str, layers: nn.ModuleList) -> Iterator[_Kind]:
    """Those of more than two layers."""
    alike: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        alike.setdefault(_looks(layer), []).append(number)
    for numbers in alike.values():
        if len(numbers) > 2:
            yield _Kind(prefix, tuple(numbers), tuple(layers[numbers[0]].state_dict()))


def _looks(layer: nn.Module) -> Hashable:
    tensors = (*layer.state_dict().items(), *layer.named_buffers())
    return (
        tuple((name, type(module)) for name, module in layer.named_modules()),
        tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors),
    )


def _removed(kind: _Kind, conversion: Conversion) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(tensor of a removed layer, its parts in the checkpoint: names, and those of the first layer's). Raises NotAlike.

    No part may belong to anything else than its layer: a tensor that several layers share has no layer's number.
    """
    first, *between, last = kind.numbers
    for tensor in kind.tensors:
        pieces, others = (conversion.pieces.get(f"{kind.prefix}{number}.{tensor}", ()) for number in (first, last))
        if [_unnamed(piece) for piece in pieces] != [_unnamed(piece) for piece in others]:
            raise NotAlike(f"layers {first} and {last} of {kind.prefix} have another {tensor} in the checkpoint")
        parts = []
        for piece, other in zip(pieces, others, strict=True):
            if conversion.shapes[piece.origin] != conversion.shapes[other.origin]:
                raise NotAlike(f"{piece.origin} and {other.origin} have other shapes")
            for target, _ in conversion.parts_of(piece.origin):
                if not target.startswith(f"{kind.prefix}{first}."):
                    raise NotAlike(f"{piece.origin} is also a part of {target}")
            parts.append((*_around_number(piece.origin, other.origin, first, last), piece.origin))
        for number in between:
            yield f"{kind.prefix}{number}.{tensor}", [(f"{low}{number}{high}", like) for low, high, like in parts]


def _unnamed(piece: Piece) -> Piece:
    return replace(piece, origin="")


def _around_number(name: str, other: str, first: int, last: int) -> tuple[str, str]:
    """What is before and behind the only difference of two names: their layers' numbers. Raises NotAlike."""
    words, others = name.split("."), other.split(".")
    places = [place for place, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]]
    if len(words) == len(others) and len(places) == 1:
        (place,) = places
        if (words[place], others[place]) == (str(first), str(last)):
            return "".join(f"{word}." for word in words[:place]), "".join(f".{word}" for word in words[place + 1 :])
    raise NotAlike(f"{name} and {other} differ in more than the numbers {first} and {last} of their layers")
