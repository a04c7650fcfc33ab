"""What ranks of a ParameterServer tell each other about their memory. Plain data, no torch."""

from __future__ import annotations

import msgspec


class PackedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a checkpoint inside a packed buffer: contiguous, at `offset` bytes from the buffer's start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: `bfloat16`."""
    offset: int
    nbytes: int


class BufferMeta(msgspec.Struct, frozen=True, kw_only=True):
    """One host buffer of a rank, which peers may read."""

    address: int
    """Where it begins in the rank's process."""
    nbytes: int
    tensors: tuple[PackedTensor, ...]


class RankMetas(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of one checkpoint, and how to reach it."""

    rank: int
    host: str
    device_id: str
    """Of the accelerator that the rank drives, as engines on its host know it; on CPU `cpu-<rank>`."""
    rdma_device: str
    """RDMA device through which the rank's memory is read; with TCP the name of the device id, one NIC each."""
    p2p_address: str
    """`host:port` of the rank's P2P store; empty if it has none."""
    buffers: tuple[BufferMeta, ...]
    stamp: int = 0
    """Where in the rank's process the checkpoint has its `Stamp`; 0 if the rank holds nothing of it."""
    incarnation: int = 0
    """The version that it shows as long as the checkpoint is registered: a number that no other registration has."""
