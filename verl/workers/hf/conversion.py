"""Map the tensors of a checkpoint to those of a transformers model, box by box.

transformers' own rules decide (`transformers.conversion_mapping`: renamed tensors, stacked experts, joined matrices).
So every tensor that `from_pretrained` loads has a place here, under its name in the files.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from verl.checkpoint_engine.errors import PlanError
from verl.compat.transformers import sort_out
from verl.workers.hf.rearranged import Piece, Rearranged

Shapes = Mapping[str, tuple[int, ...]]
MAX_NAMES_IN_MESSAGE = 8


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The map between a checkpoint and a model. The model's names are those of parameters, tied ones once."""

    model: str
    """The model's class, for messages."""
    pieces: Mapping[str, tuple[Piece, ...]]
    """Tensor of the model to its pieces; `Piece.origin` is a tensor of the checkpoint."""
    shapes: Shapes
    """Shapes of the checkpoint's tensors in `pieces`, in the order of the model."""
    copies: Mapping[str, str]
    """Names under which the checkpoint holds a tied tensor once more, and the name in `shapes` that it repeats."""
    aside: tuple[str, ...]
    """Tensors of the checkpoint that are no part of the model."""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    """A sentence for each tensor of another shape."""

    def parts_of(self, name: str) -> Iterator[tuple[str, Piece]]:
        """(tensor of the model, piece) for every part of the tensor `name` of the checkpoint."""
        return iter(self._parts[name])

    @property
    def _parts(self) -> dict[str, list[tuple[str, Piece]]]:
        found: dict[str, list[tuple[str, Piece]]] | None = self.__dict__.get("_found")
        if found is None:
            found = {name: [] for name in self.shapes}
            for target, pieces in self.pieces.items():
                for piece in pieces:
                    found[piece.origin].append((target, piece))
            object.__setattr__(self, "_found", found)
        return found

    def groups(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The smallest groups (tensors of the model, tensors of the checkpoint) that convert into each other."""
        done: set[str] = set()
        for first in self.pieces:
            if first in done:
                continue
            targets, origins, todo = [first], [], [first]
            while todo:
                for piece in self.pieces[todo.pop()]:
                    if piece.origin in origins:
                        continue
                    origins.append(piece.origin)
                    more = [target for target, _ in self.parts_of(piece.origin) if target not in targets]
                    targets += (more := list(dict.fromkeys(more)))
                    todo += more
            done.update(targets)
            yield tuple(targets), tuple(dict.fromkeys(origins))

    def require_whole(self) -> None:
        """Raises PlanError naming all missing, unexpected and misshapen tensors."""
        if self.missing or self.unexpected:
            extra = sorted((*self.unexpected, *self.aside))  # what is missing may go by another name
            raise PlanError(
                f"the tensors of {self.model} and of its checkpoint differ; "
                f"in the model only: {listed_names(self.missing)}; in the checkpoint only: {listed_names(extra)}"
            )
        if self.misshapen:
            raise PlanError(f"shapes differ; {'; '.join(self.misshapen[:MAX_NAMES_IN_MESSAGE])}")


def conversion_of(model: PreTrainedModel, shapes: Shapes, *, may_lack: Collection[str] = ()) -> Conversion:
    """The conversion that `from_pretrained` applies to a checkpoint of `shapes`. `model` may be on the meta device.

    `may_lack`: tensors of the model that the checkpoint may lack; the result leaves those out. Names and shapes that do
    not fit raise no error here but in `Conversion.require_whole`.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    first_name = first_names(model)
    loading = _Loading(model, own)
    loading.collect(shapes)
    made, impossible, incomplete = loading.convert()
    misshapen = list(impossible.values())
    pieces: dict[str, tuple[Piece, ...]] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in sorted(made.items(), key=lambda item: item[0] in first_name):
        target = first_name.get(name, name)
        if tuple(tensor.shape) != own[target]:
            misshapen.append(_shape_problem(target, own[target], tensor))
        names.setdefault(target, []).append(tensor.pieces[0].origin if tensor.pieces else "")
        pieces.setdefault(target, tensor.pieces)
    lacking = {first_name.get(name, name) for name in own} - pieces.keys() - set(may_lack) - impossible.keys()
    missing = incomplete | loading.checkpoint_names(
        lacking - {name for name in lacking if loading.may_be_computed(name)}
    )
    order = {name: index for index, name in enumerate(own)}
    pieces = {
        name: tuple(sorted(pieces[name], key=lambda piece: piece.box.start))
        for name in sorted(pieces, key=order.__getitem__)
    }
    return Conversion(
        model=type(model).__name__,
        pieces=pieces,
        shapes={piece.origin: shapes[piece.origin] for own_pieces in pieces.values() for piece in own_pieces},
        copies={other: own_names[0] for own_names in names.values() for other in own_names[1:]},
        aside=tuple(loading.aside),
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(loading.unexpected)),
        misshapen=tuple(misshapen),
    )


def first_names(model: nn.Module) -> dict[str, str]:
    """For names under which a parameter appears again (the head of tied embeddings): its first name."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (earlier := first.setdefault(id(parameter), name)) != name:
            found[name] = earlier
    return found


@dataclass
class _Collected:
    """Tensors of the checkpoint that one rule turns into tensors of the model."""

    transform: WeightRenaming | WeightConverter
    keys: dict[str, list[str]] = field(default_factory=dict)
    """By pattern of the rule."""

    def series(self) -> list[list[str]]:
        """Keys that a rule numbers, as it does experts."""
        if not isinstance(self.transform, WeightConverter):
            return []
        return [keys for pattern, keys in self.keys.items() if "*" in pattern]


class _Loading:
    """transformers' `convert_and_load_state_dict_in_model`, step by step, on names and shapes."""

    def __init__(self, model: PreTrainedModel, own: Shapes) -> None:
        self._model = model
        self._own = dict(own)
        self._transforms = get_model_conversion_mapping(model)
        self._collected: dict[str, _Collected] = {}
        self._shapes: Shapes = {}
        self.aside: list[str] = []
        self.unexpected: list[str] = []

    def collect(self, shapes: Shapes) -> None:
        """Find the place of every tensor of the checkpoint."""
        self._shapes = shapes
        renamings = [entry for entry in self._transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        base = self._model.base_model_prefix
        nowhere: dict[str, str] = {}
        for key in sorted(shapes, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, base, self._own)
            if target not in self._own and key in self._own:
                target, pattern = rename_source_key(key, [], [], base, self._own)
            if target not in self._own:
                nowhere[key] = target
                continue
            if target not in self._collected:
                rule = copy.deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(key, target)
                self._collected[target] = _Collected(rule)
            group = self._collected[target]
            group.keys.setdefault(pattern or key, []).append(key)
            group.transform.add_tensor(target, key, pattern or key, Rearranged.of(key, shapes[key]))  # type: ignore[arg-type]
        self._sort_out(nowhere)

    def _sort_out(self, nowhere: Mapping[str, str]) -> None:
        """What has no place is left aside if transformers leaves it out, too, or if it is a module of its own."""
        info = sort_out(self._model, unexpected=nowhere.values())
        for key, target in nowhere.items():
            ignored = target not in info.unexpected_keys
            (self.aside if ignored or self._is_apart(target) else self.unexpected).append(key)

    def _is_apart(self, name: str) -> bool:
        """Whether it belongs beside what the model has (a layer more, another head), not into one of its layers."""
        module: nn.Module = self._model
        for part in name.split(".")[:-1]:
            child = getattr(module, part, None)
            if not isinstance(child, nn.Module):
                return isinstance(module, nn.ModuleList | PreTrainedModel)
            module = child
        return False

    def convert(self) -> tuple[dict[str, Rearranged], dict[str, str], set[str]]:
        """(tensors of the model, sentences about those that cannot be made, names that are not there)"""
        made: dict[str, Rearranged] = {}
        problems: dict[str, str] = {}
        missing: set[str] = set()
        saved = self._saved([target for target, group in self._collected.items() if group.series()])
        for target, group in self._collected.items():
            if gaps := self._gaps(target, group, saved):
                missing |= gaps
                continue
            try:
                converted = group.transform.convert(target, model=self._model, config=self._model.config)
            except (ValueError, IndexError, KeyError, AttributeError, RuntimeError) as exc:
                sources = ", ".join(key for keys in group.keys.values() for key in keys[:2])
                problems[target] = f"{target} cannot be made of {sources}, ...: {exc}"
                continue
            made |= {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
        return made, problems, missing

    def _gaps(self, target: str, group: _Collected, saved: Mapping[str, set[str]]) -> set[str]:
        """Members of a series that the checkpoint lacks; a series would close over them."""
        if not isinstance(group.transform, WeightConverter):
            return set()
        numbered = group.series()
        expected = {member for keys in numbered for member in _series(keys, max(len(other) for other in numbered))}
        usual = saved[target] if numbered else set()
        if usual & self._shapes.keys():
            expected |= usual
        if gaps := expected - self._shapes.keys():
            return gaps
        absent = [pattern for pattern in group.transform.source_patterns if pattern not in group.keys]
        return self.checkpoint_names({target}) if absent else set()

    def may_be_computed(self, name: str) -> bool:
        """Whether the model computes it where a checkpoint lacks it: a buffer that transformers does not miss."""
        return not sort_out(self._model, missing=[name]).missing_keys and name not in dict(
            self._model.named_parameters()
        )

    def checkpoint_names(self, targets: Iterable[str]) -> set[str]:
        """The names that a checkpoint should have for these tensors of the model, those that it has left out."""
        names: set[str] = set()
        for target in targets:
            names |= self._saved([target])[target] - self._shapes.keys() or {target}
        return names

    def _saved(self, targets: Sequence[str]) -> dict[str, set[str]]:
        """The names under which transformers would save each tensor; none if it cannot tell from the shape alone."""
        names: dict[str, set[str]] = {target: set() for target in targets}
        if not targets:
            return names
        symbolic: Any = {target: Rearranged.of(target, self._own[target]) for target in targets}
        try:
            saved: Any = revert_weight_conversion(self._model, symbolic)
        except (ValueError, IndexError, KeyError, AttributeError, RuntimeError):
            # It may be able to tell of others.
            return names if len(targets) == 1 else {target: self._saved([target])[target] for target in targets}
        for name, tensor in saved.items():
            for piece in tensor.pieces:
                names[piece.origin].add(name)
        return names


def _series(keys: list[str], count: int) -> set[str]:
    """The names 0, 1, ... of which `keys` are some or all; `count` of them at least."""
    rows = [key.split(".") for key in keys]
    varying = [index for index in range(len(rows[0])) if len({row[index] for row in rows}) > 1]
    if not varying:  # one only; its number is the last in its name
        varying = [index for index, part in enumerate(rows[0]) if re.fullmatch(r"\d+", part)][-1:]
    if len(varying) != 1:
        return set()
    place = varying[0]
    numbers = [int(row[place]) for row in rows]
    return {
        ".".join((*rows[0][:place], str(number), *rows[0][place + 1 :]))
        for number in range(max(count, *(number + 1 for number in numbers)))
    }


def _shape_problem(target: str, own: tuple[int, ...], tensor: Rearranged) -> str:
    origins = list(dict.fromkeys(piece.origin for piece in tensor.pieces))
    name = origins[0] if len(origins) == 1 else f"{target} (made of {origins[0]}, ...)"
    return f"{name}: {own} in the model, {tuple(tensor.shape)} in the checkpoint"


def listed_names(names: Iterable[str]) -> str:
    """Some of the names and the number of the others, for messages."""
    names = list(names)
    more = f" and {len(names) - MAX_NAMES_IN_MESSAGE} more" if len(names) > MAX_NAMES_IN_MESSAGE else ""
    return (", ".join(names[:MAX_NAMES_IN_MESSAGE]) or "none") + more
