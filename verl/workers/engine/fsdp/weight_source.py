"""The checkpoint engine's source of one FSDP rank's weights. No method communicates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.memory.publishing import copy_values
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.workers.engine.tensors import HeldTensor, Part

DELTA_NUMEL = 2**16
"""Elements for which an adapter's product is computed at a time: 256 KiB of temporary memory in float32."""


class FSDPWeightSource:
    """Implements `verl.checkpoint_engine.ports.WeightSource` for what a `Sharding` says that this rank holds.

    FSDP2's rows are one box, which is contiguous. FSDP1's flat range of a parameter is its last part of a first row,
    whole rows, and the first part of a last row; it may also be nothing. Ranks that hold the same (hybrid sharding)
    declare the same boxes; the planner chooses who sends. With offloaded parameters the host copies are read.

    Tied embeddings are sent once, under the name that the checkpoint has for them. `rollout_dtype` applies to
    floating-point parameters but for those in `kept_wide`, which travel as they are held, as do buffers.
    """

    def __init__(
        self, tensors: Mapping[str, HeldTensor], *, rollout_dtype: str, kept_wide: Collection[str] = ()
    ) -> None:
        self._tensors = tensors
        self._specs = tuple(
            TensorSpec(
                name=name,
                shape=tensor.shape,
                dtype=rollout_dtype
                if tensor.is_parameter and tensor.dtype.is_floating_point and name not in kept_wide
                else _dtype_name(tensor.dtype),
            )
            for name, tensor in tensors.items()
        )
        self._dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self._specs}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    @property
    def device(self) -> torch.device | None:
        devices = {part.values().device for tensor in self._tensors.values() for part in tensor.parts}
        return devices.pop() if len(devices) == 1 else None

    def shards(self) -> Sequence[Shard]:
        return tuple(Shard(name, part.box) for name, tensor in self._tensors.items() for part in tensor.parts)

    @torch.no_grad()
    def view(self, shard: Shard) -> torch.Tensor | None:
        """A view, for values that host memory holds as they are sent: without a cast, adapters or strides."""
        part, values = self._find(shard)
        as_sent = part.delta is None and values.dtype == self._dtypes[shard.name]
        return values if as_sent and values.device.type == "cpu" and values.is_contiguous() else None

    @torch.no_grad()
    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        """It casts, crosses devices and handles strides at memory speed.

        Adapters are added in float32, so that one rounding is all that happens.
        """
        part, values = self._find(shard)
        if part.delta is None:
            copy_values(destination, values)
            return
        (low, left), (high, right) = shard.box.start, shard.box.stop
        step = max(DELTA_NUMEL // (right - left), 1)
        for row in range(low, high, step):
            rows = slice(row - low, min(row + step, high) - low)
            destination[rows] = part.delta(Box((row, left), (low + rows.stop, right))).add_(values[rows])

    def _find(self, shard: Shard) -> tuple[Part, torch.Tensor]:
        """The part of this rank that has `shard`, and its values there. Raises PlanError if there is none."""
        parts = self._tensors[shard.name].parts if shard.name in self._tensors else ()
        part = next((part for part in parts if part.box.contains(shard.box)), None)
        if part is None:
            held = ", ".join(str(part.box) for part in parts) or "nothing"
            raise PlanError(f"this rank was asked for {shard.box} of {shard.name} and holds {held}")
        offsets = zip(part.box.start, shard.box.start, shard.box.stop, strict=True)
        return part, part.values()[tuple(slice(start - base, stop - base) for base, start, stop in offsets)]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
