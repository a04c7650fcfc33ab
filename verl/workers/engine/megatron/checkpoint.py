"""Training checkpoints of a Megatron rank by torch DCP, in the coordinates of Hugging Face tensors.

So any layout of ranks continues from any other's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from verl.checkpoint_engine.compat.torch import make_tensor_without_memory
from verl.workers.engine.tensors import HeldTensor, Part


class HeldInCheckpoint(torch.Tensor):
    """A tensor of which this rank holds parts, as torch DCP's `_Checkpointable`: DCP writes and fills them in place.

    It is a `torch.Tensor` of the whole shape without memory, because DCP accepts nothing else. Ranks that hold the same
    part declare the same item, and DCP writes it once.
    """

    _parts: dict[torch.Size, Part]

    def __new__(cls, tensor: HeldTensor) -> HeldInCheckpoint:
        made: HeldInCheckpoint = make_tensor_without_memory(cls, tensor.shape, tensor.dtype)
        made._parts = {torch.Size(part.box.start): part for part in tensor.parts}
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Required by torch: the tensor has no memory to compute with."""
        raise TypeError(f"{func} of a tensor that only names its parts")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(part),
                    properties=TensorProperties.create_from_tensor(part.values()),
                    size=self.size(),
                ),
            )
            for offset, part in self._parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(part) for part in self._parts.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None  # this tensor's items have one
        return self._parts[index.offset].values()


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(part.box.start), sizes=torch.Size(part.box.shape))
