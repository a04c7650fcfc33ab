"""The checkpoints that one rank holds in host memory, and the wire through which peers read them."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import BackendUnavailable, ConfigError
from ..links.stamps import Stamp
from ..links.wire import Wire
from .buffers import HostBuffer, load_buffers
from .records import BufferMeta, RankMetas

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """This rank's part of one checkpoint."""

    buffers: tuple[HostBuffer, ...] = ()
    stamp: Stamp | None = None
    """The stamp that shows peers that the buffers are registered."""
    incarnation: int = 0
    """The stamp's version; 0: not registered."""


NOTHING = Holding()


class Holdings:
    def __init__(
        self, *, rank: int, world_size: int, device_id: str, rdma_device: str, new_wire: Callable[[], Wire]
    ) -> None:
        """`rdma_device`: empty with TCP. `new_wire` opens the wire for peers; it may raise BackendUnavailable."""
        self._rank, self._world_size = rank, world_size
        self._device_id = device_id
        self._rdma_device = rdma_device
        self._new_wire = new_wire
        self._held: dict[str, Holding] = {}
        self._spare: tuple[HostBuffer, ...] = ()
        """Memory of an unregistered checkpoint, for the next one of the same layout."""
        self._stamps: list[Stamp] = []
        """All stamps, also of unregistered checkpoints: peers may still read them."""
        self._wire: Wire | None = None

    def register(self, name: str, files: Sequence[Path], named_tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Load and register checkpoint `name`. Raises ConfigError for bad files, too little memory, or a used name."""
        if name in self._held:
            raise ConfigError(f"checkpoint {name!r} is registered already: unregister it first")
        buffers = tuple(
            load_buffers(
                files=files,
                named_tensors=named_tensors,
                rank=self._rank,
                world_size=self._world_size,
                reuse=self._spare,
            )
        )
        self._spare = ()
        if (wire := self._serving()) is not None:
            for buffer in buffers:
                wire.register(buffer.memory.numpy())
        stamp, incarnation = self._free_stamp(), secrets.randbits(62) | 1
        stamp.finish(incarnation)
        self._held[name] = Holding(buffers=buffers, stamp=stamp, incarnation=incarnation)

    def unregister(self, name: str, *, keep_memory: bool) -> None:
        """Unregister checkpoint `name`. `keep_memory`: keep its memory for the next one of the same layout.

        Raises ConfigError if `name` is not registered.
        """
        holding = self._held.pop(name, None)
        if holding is None:
            known = ", ".join(self._held) or "none"
            raise ConfigError(f"checkpoint {name!r} is not registered on rank {self._rank}; registered: {known}")
        assert holding.stamp is not None
        holding.stamp.begin()
        if self._wire is not None:
            for buffer in holding.buffers:
                self._wire.deregister(buffer.memory.numpy())
        self._spare = holding.buffers if keep_memory else ()

    def __getitem__(self, name: str) -> Holding:
        """The holding of `name`; `NOTHING` if it is not registered."""
        return self._held.get(name, NOTHING)

    def metas(self, name: str) -> RankMetas:
        """The record that peers need to read checkpoint `name` from this rank."""
        holding = self[name]
        return RankMetas(
            rank=self._rank,
            host=socket.gethostname(),
            device_id=self._device_id,
            rdma_device=self._rdma_device or self._device_id,
            p2p_address=self._wire.address().decode() if self._wire is not None else "",
            buffers=tuple(
                BufferMeta(address=buffer.memory.data_ptr(), nbytes=buffer.memory.nbytes, tensors=buffer.tensors)
                for buffer in holding.buffers
            ),
            stamp=holding.stamp.bytes.ctypes.data if holding.stamp is not None else 0,
            incarnation=holding.incarnation,
        )

    def _serving(self) -> Wire | None:
        """Opened when it is first needed; None without Mooncake, which broadcasts do not need."""
        if self._wire is None:
            try:
                self._wire = self._new_wire()
            except BackendUnavailable as exc:
                logger.warning("rank %d can only take part in broadcasts: %s", self._rank, exc)
        return self._wire

    def _free_stamp(self) -> Stamp:
        taken = [holding.stamp for holding in self._held.values()]
        for stamp in self._stamps:
            if stamp not in taken:
                return stamp
        stamp = Stamp()
        if self._wire is not None:
            self._wire.register(stamp.bytes)
        self._stamps.append(stamp)
        return stamp

    def close(self) -> None:
        """Free all checkpoints and close the wire. Idempotent."""
        self._held.clear()
        self._spare = ()
        self._stamps.clear()
        if self._wire is not None:
            self._wire.close()
            self._wire = None
