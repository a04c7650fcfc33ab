"""The records by which ranks of a ParameterServer describe their memory to each other. No torch."""

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
    """Its address in the rank's process."""
    nbytes: int
    tensors: tuple[PackedTensor, ...]


class RankMetas(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of one checkpoint, and the address to read it from."""

    rank: int
    host: str
    device_id: str
    """The id of the rank's accelerator, by which engines on its host know it; on CPU `cpu-<rank>`."""
    rdma_device: str
    """The RDMA device through which peers read the rank's memory; with TCP the device id, as if each had a NIC."""
    p2p_address: str
    """`host:port` of the rank's P2P store; empty if it has none."""
    buffers: tuple[BufferMeta, ...]
    stamp: int = 0
    """The address of the checkpoint's `Stamp` in the rank's process; 0 if the rank holds no part."""
    incarnation: int = 0
    """The stamp's version while the checkpoint is registered: unique for each registration."""
