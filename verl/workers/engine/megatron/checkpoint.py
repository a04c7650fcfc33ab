"""Training checkpoints of a Megatron rank by torch DCP, in the coordinates of Hugging Face tensors.

So any layout of ranks continues from any other's.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from verl.workers.engine.fsdp.tensors import HeldTensor, Part


class HeldInCheckpoint:
    """A tensor of which this rank holds parts, as torch DCP's `_Checkpointable`: it writes and fills them in place.

    Ranks that hold the same part declare the same item; DCP has it written once.
    """

    def __init__(self, tensor: HeldTensor) -> None:
        self._tensor = tensor
        self._parts = {torch.Size(part.box.start): part for part in tensor.parts}

    def size(self) -> torch.Size:
        return torch.Size(self._tensor.shape)

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
