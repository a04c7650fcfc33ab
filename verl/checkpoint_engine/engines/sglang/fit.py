"""Check that a version fits the model that a rank of SGLang serves, without changing a value of the model.

SGLang's own loaders decide: they get tensors with the version's names, dtypes and shapes and without memory. Their
writes into the model are recorded and skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...compat.torch import TorchDispatchMode, changed_by, storage_of, tensors_in, without_changing
from .orders import Report, TensorShapes

CANNOT = (NotImplementedError, AttributeError, TypeError)
"""Errors of loaders that need a tensor's values, not only its copy."""
EMBEDDING = "VocabParallelEmbedding"
"""The class of vocabulary matrices, whose rows are padded with zeros."""


def fit_of(model: Any, tensors: TensorShapes) -> Report:
    """Report how `tensors` would fit `model`, which is not changed. Raises CANNOT for unsupported loaders."""
    trial = _Trial(model, tensors)
    with trial:
        problems = trial.load_all()
    return trial.report(problems)


class _Trial(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around loads into `model`, which is as before when it ends."""

    def __init__(self, model: Any, tensors: TensorShapes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._shapes = model, tensors
        self._lent = {
            name: torch.zeros((), dtype=getattr(torch, dtype)).expand(shape) for name, (dtype, shape) in tensors.items()
        }
        self._within: dict[int, frozenset[str]] = {
            storage_of(tensor): frozenset([name]) for name, tensor in self._lent.items()
        }
        """Which of the lent tensors have gone into a storage that loaders made."""
        self._made: set[int] = set()
        """Storages that loaders made; all others are the model's, or lent, and are left as they are."""
        self._held = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        self._names = {storage_of(tensor): name for name, tensor in self._held.items()}
        self._placed = [
            (module, name, tensor, tensor.data)
            for module in model.modules()
            for found in (module.named_parameters, module.named_buffers)
            for name, tensor in found(recurse=False, remove_duplicate=False)
        ]
        self._current = self._touched = ""
        """The tensor that is loaded, and the one of which something was done last."""
        self._towards = ""
        """What of the model something was done with last."""
        self._written: dict[int, set[tuple[Any, ...]]] = defaultdict(set)
        """By storage of the model: the parts of it that were written to."""
        self._sources: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
        """By lent tensor: the parts of storages that it was written to."""
        self._filled_by: dict[int, set[str]] = defaultdict(set)
        self._embeddings = [
            module for module in model.modules() if any(kind.__name__ == EMBEDDING for kind in type(module).__mro__)
        ]
        self._may_pad = {storage_of(module.weight) for module in self._embeddings}
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self._may_pad |= self._names.keys()  # heads, or rows, may not divide evenly
        self._widened: set[str] = set()
        self._refused: set[str] = set()
        self._mistaken: set[str] = set()

    def load_all(self) -> list[str]:
        """What the loaders refuse."""
        problems, left = [], list(self._lent.items())
        while left:
            self._current = self._touched = self._towards = ""
            given = self._named(left)
            try:
                self._model.load_weights(given)
            except CANNOT:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever SGLang's loaders raise
                current, touched, towards = self._current, self._touched, self._towards
                left = [*given]
                problems.append(self._refusal(current if left else touched or current, towards, exc))
            else:
                break
        return problems

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._current, self._touched, self._towards = name, "", ""
            yield name, tensor

    def _refusal(self, name: str, towards: str, exc: Exception) -> str:
        self._refused.add(name)
        place = f" in {towards} {[*self._held[towards].shape]}" if towards else ""
        kind = "" if isinstance(exc, (AssertionError, ValueError, RuntimeError)) else f"{type(exc).__name__}: "
        said = " ".join(f"{kind}{exc}".split())
        return f"{name} {[*self._shapes[name][1]]} is refused{place}" + (f" ({said})" if said else "")

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for module, name, tensor, data in self._placed:
            found = getattr(module, name, None)
            if isinstance(found, torch.Tensor) and storage_of(found) != storage_of(data):
                self._note(self._within.get(storage_of(found), frozenset()), data)
            if found is not tensor:
                setattr(module, name, tensor)
            if storage_of(tensor) != storage_of(data):
                tensor.data = data

    def report(self, problems: Sequence[str]) -> Report:
        """Called when it has ended."""
        taken = {name: sum(part[-1] for part in parts) for name, parts in self._sources.items()}
        unread = sorted(self._shapes.keys() - taken.keys() - self._refused)
        unfilled = sorted(name for name, held in self._held.items() if self._filled(held) < held.numel())
        return Report(
            problems=[*problems, *self._of_other_kind()],
            unfilled=[] if problems else unfilled,
            unread=unread,
            widened=sorted(self._widened),
            parts={name: numel for name, numel in taken.items() if numel < self._lent[name].numel()},
            copies=self._copies(unread),
        )

    def _of_other_kind(self) -> list[str]:
        """Loaders cast: quantized integers would become weights without their scale, and fractions would be cut."""
        return [
            f"{name} is {self._shapes[name][0]}, and its place in the model is not" for name in sorted(self._mistaken)
        ]

    def _copies(self, unread: Sequence[str]) -> dict[str, str]:
        """A head that the model has not, since it takes its embedding for both."""
        embeddings = sorted(
            source for module in self._embeddings for source in self._filled_by[storage_of(module.weight)]
        )
        twins = {name: [twin for twin in embeddings if self._shapes[twin] == self._shapes[name]] for name in unread}
        return {name: found[0] for name, found in twins.items() if found}

    def _filled(self, held: torch.Tensor) -> int:
        return sum(part[-1] for part in self._written[storage_of(held)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*tensors_in((args, kwargs))]
        sources = frozenset().union(*(self._within.get(storage_of(tensor), ()) for tensor in given))
        self._touched = next(iter(sources), self._touched)
        self._towards = next((self._names[key] for key in map(storage_of, given) if key in self._names), self._towards)
        changed = [*changed_by(func, args, kwargs)]
        if any(storage_of(tensor) not in self._made for tensor in changed):
            if func is torch.ops.aten.copy_.default:
                torch.broadcast_to(torch.empty(args[1].shape, device="meta"), args[0].shape)  # as it would refuse
            for tensor in changed:
                self._note(sources, tensor)
            return without_changing(func, changed)
        result = func(*args, **kwargs)
        if isinstance(result, (bool, int, float)):
            for tensor in given:
                self._note(sources, tensor)  # for a fill with it
        before = {storage_of(tensor) for tensor in given}
        for tensor in changed:
            self._within[storage_of(tensor)] = self._within.get(storage_of(tensor), frozenset()) | sources
        for made in tensors_in(result):
            if (key := storage_of(made)) not in before:
                self._made.add(key)
                self._within[key] = sources
        return result

    def _note(self, sources: frozenset[str], target: torch.Tensor) -> None:
        key = storage_of(target)
        part = (key, target.storage_offset(), *target.size(), *target.stride(), target.numel())
        if sources or target.numel() == 1 or key in self._may_pad:  # zeros in place of what is too small fill nothing
            self._written[key].add(part)
        self._filled_by[key] |= sources
        for name in sources:
            self._sources[name].add(part)
            lent = self._lent[name].dtype
            if lent.is_floating_point != target.dtype.is_floating_point:
                self._mistaken.add(name)
            elif target.dtype == torch.float32 and lent.itemsize < target.dtype.itemsize:
                self._widened.add(name)
