"""What verl's engine gives of the weights: whole tensors one after the other, or the shards that they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from ..compat.fsdp import local_boxes
from ..errors import PlanError
from ..plan.types import Shard
from ..publisher.model_source import ModelSource


class ShardedWeights(Iterator[tuple[str, torch.Tensor]]):
    """Gathers as verl does, for who iterates over it; who does not may ask for this rank's shards."""

    def __init__(
        self, gathered: Iterable[tuple[str, torch.Tensor]], shards: Callable[[], dict[str, torch.Tensor]]
    ) -> None:
        self._gathered = iter(gathered)
        self.shards = shards
        """Names to parameters as they lie, borrowed."""

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._gathered)


class Gathered(ModelSource):
    """Whole tensors, which one rank holds; the others know of them."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], *, keeps: bool, shards: Shards | None) -> None:
        """Gathers all of `weights`, on every rank. `shards` are compared on the way."""
        self._held: dict[str, torch.Tensor] = {}
        self._keeps = keeps
        for name, tensor in weights:
            if name in self._held:
                raise PlanError(f"{name} is sent twice")
            self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if keeps else "meta")
            self._take(name, tensor)
            if shards is not None:
                shards.compare(name, tensor)
        super().__init__(self._held)

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The next version. Raises PlanError unless it has the tensors of the first."""
        missing = set(self._held)
        for name, tensor in weights:
            if name not in missing:
                raise PlanError(f"{name} {'is sent twice' if name in self._held else 'was not in the first version'}")
            missing.remove(name)
            self._take(name, tensor)
        if missing:
            raise PlanError(f"not sent this time: {', '.join(sorted(missing))}")

    def shards(self) -> Sequence[Shard]:
        return super().shards() if self._keeps else []

    def _require_values(self) -> None:
        if self._keeps:
            super()._require_values()

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        held = self._held[name]
        if (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            before, now = (f"{one.dtype} of shape {tuple(one.shape)}" for one in (held, tensor))
            raise PlanError(f"{name}, {before}, is now {now}")
        if self._keeps:
            held.copy_(tensor.detach())


class Shards:
    """A rank's shards, held against what verl gathers before they stand for it."""

    def __init__(self, read: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._read = read
        self._found = read()
        self._dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """As held, and as gathered."""
        self.tensors: dict[str, torch.Tensor] = {}
        """Under the names that are gathered. The same dictionary each time."""
        self._different = ""

    def compare(self, name: str, gathered: torch.Tensor) -> None:
        """Note if this rank's part of `gathered` is not what its shard becomes in that dtype."""
        own = self._found.get(name)
        if own is None or own.shape != gathered.shape:
            self._different = self._different or f"{name} is not among the shards, or of another shape there"
            return
        self.tensors[name] = own
        self._dtypes[name] = own.dtype, gathered.dtype
        pairs = [(own, gathered)]
        if isinstance(own, DTensor):
            pairs = [
                (own.to_local()[inside], gathered[tuple(map(slice, start, stop))])
                for start, stop, inside in local_boxes(own)
            ]
        if not all(torch.equal(part.detach().to(whole.device, whole.dtype), whole) for part, whole in pairs):
            self._different = self._different or f"{name} is gathered with other values than its shards have"

    @property
    def dtype(self) -> str | None:
        """What floating-point tensors have to be sent in; None: as they are held."""
        changed = {sent for held, sent in self._dtypes.values() if held != sent}
        return str(changed.pop())[len("torch.") :] if changed else None

    @property
    def why_not(self) -> str:
        """Empty if they can stand for what is gathered."""
        sent = {sent for _, sent in self._dtypes.values() if sent.is_floating_point}
        mixed = self.dtype is not None and len(sent) > 1
        return self._different or ("they are gathered in several dtypes" if mixed else "")

    def refresh(self) -> None:
        """Before each publication: verl may have moved its parameters meanwhile."""
        self._found = self._read()
        for name in self.tensors:
            self.tensors[name] = self._found[name]
