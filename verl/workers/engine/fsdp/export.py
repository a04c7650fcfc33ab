"""Write a Hugging Face model directory from a sharded model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from verl.workers.config import HFModelConfig
from verl.workers.engine.adapters import BASE, is_adapter
from verl.workers.engine.fsdp.mesh import replication_allowed
from verl.workers.engine.fsdp.model import BuiltModel
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.conversion import Conversion
from verl.workers.hf.directory import FILE_NBYTES, write_hf_directory

ASIDE = "aside"
"""The key of tensors that are no part of the model, instead of a tensor's name."""


@torch.no_grad()
@replication_allowed()
def export_hf(
    directory: Path,
    built: BuiltModel,
    model_config: HFModelConfig,
    *,
    dtype: torch.dtype | None = None,
    file_nbytes: int = FILE_NBYTES,
) -> None:
    """Write the model with its present weights; names, dtypes and other files are those of its directory.

    With `dtype` all floating-point tensors get that. Adapters are merged into the weights. Tensors that are no part of
    the model are copied.

    A collective: ranks gather one group of related tensors at a time, so rank 0 holds at most one file of about
    `file_nbytes`. All files are synced to disk when this returns.
    """
    with HFCheckpoint(Path(model_config.path)) as checkpoint:
        export = _Export(built, checkpoint, dtype)
        write_hf_directory(
            directory,
            export.nbytes(),
            export.collect,
            model_config=model_config,
            dtype=dtype,
            own_config=built.own_config,
            file_nbytes=file_nbytes,
        )


class _Export:
    def __init__(self, built: BuiltModel, checkpoint: HFCheckpoint, dtype: torch.dtype | None) -> None:
        self._conversion, self._adapters = built.conversion, built.adapters
        self._checkpoint, self._dtype = checkpoint, dtype
        self._aside = built.exported_aside
        state: dict[str, Any] = get_model_state_dict(built.module)
        self._state = {_plain(name): (name, tensor) for name, tensor in state.items() if not is_adapter(name)}
        self._groups = {targets[0]: (targets, origins) for targets, origins in self._conversion.groups()}
        self._new = [name for name in self._state if name in built.new]

    def nbytes(self) -> dict[str, int]:
        """By key of `collect`."""
        shapes = self._conversion.shapes
        sizes = {
            key: sum(math.prod(shapes[name]) * self._dtype_of(name).itemsize for name in origins)
            for key, (_, origins) in self._groups.items()
        }
        sizes |= {name: self._state[name][1].nbytes for name in self._new}
        aside = sum(math.prod(self._checkpoint.shape(n)) * self._checkpoint.dtype(n).itemsize for n in self._aside)
        return sizes | ({ASIDE: aside} if self._aside else {})

    def collect(self, key: str) -> dict[str, torch.Tensor]:
        """Copies in host memory on rank 0, under the names of the checkpoint. A collective."""
        if key == ASIDE:
            return {name: self._checkpoint.read(name) for name in self._aside} if dist.get_rank() == 0 else {}
        if key in self._new:
            whole = self._whole(key)
            to = self._dtype or self._checkpoint.common_dtype()
            return {key: whole.to(device="cpu", dtype=to, copy=True)} if dist.get_rank() == 0 else {}
        targets, origins = self._groups[key]
        whole_of = {}
        for target in targets:
            whole = self._whole(target)
            if dist.get_rank() == 0:
                whole_of[target] = whole
        if dist.get_rank() != 0:
            return {}
        found = {name: from_model(name, self._conversion, whole_of, self._dtype_of(name)) for name in origins}
        copies = {other: name for other, name in self._conversion.copies.items() if name in found}
        return found | {other: found[name].clone() for other, name in copies.items()}

    def _whole(self, target: str) -> torch.Tensor:
        name, tensor = self._state[target]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole if self._adapters is None else self._adapters.merge(name, whole)

    def _dtype_of(self, name: str) -> torch.dtype:
        dtype = self._checkpoint.dtype(name)
        return self._dtype if self._dtype and dtype.is_floating_point else dtype


def from_model(
    name: str, conversion: Conversion, whole_of: dict[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor `name` of the checkpoint, from whole tensors of the model: a copy in host memory."""
    made = torch.empty(conversion.shapes[name], dtype=dtype)
    for target, piece in conversion.parts_of(name):
        values = whole_of[target][tuple(map(slice, piece.box.start, piece.box.stop))]
        box = piece.origin_box
        made[tuple(map(slice, box.start, box.stop))] = piece.to_origin(values).to("cpu")
    return made


def _plain(name: str) -> str:
    return name.replace(BASE, ".")
