"""`gloo`, `nccl` and `hccl`: each makes process groups over a given store, and broadcasts that can be polled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..compat.torch import BroadcastOptions, Store, gloo_group, hccl_class, set_timeout
from ..config import GlooOptions, HcclOptions, NcclOptions
from ..errors import BackendUnavailable
from ..plan.topology import Lane
from ..support.admission import Doorkeeper
from ..support.package import extra
from .network import own_address


class Flight(Protocol):
    """One broadcast under way."""

    def is_done(self) -> bool:
        """Whether all bytes have been sent, or received. Raises RuntimeError if the broadcast failed."""


class GroupMaker(Protocol):
    def listen_at(self, host: str, doors: Doorkeeper) -> None:
        """Make later groups listen at `host`; `doors` decides which peers may connect."""

    def group(self, store: Store, rank: int, size: int, lane: Lane, timeout_s: float) -> Any:
        """Make a group of `size` members, whose operations fail after `timeout_s`. Raises RuntimeError."""


class Communicator(GroupMaker, Protocol):
    """One communication library: it makes groups, and broadcasts host memory, directly or through a device."""

    @staticmethod
    def require() -> Any:
        """Raises BackendUnavailable if this process cannot use the library."""

    def broadcast(self, group: Any, memory: torch.Tensor, *, sending: bool) -> Flight:
        """Begin to send `memory` (host, uint8) from rank 0 of `group`, or to receive into it. Borrowed until done."""

    def leave(self, group: Any) -> None:
        """Free `group`, which is not used any more. It may block until the group's last operation has ended."""

    def max_in_flight(self, per_owner: int, owners: int) -> int:
        """The most broadcasts that a node has under way in all its groups together."""

    def release(self) -> None:
        """Drop the resources that groups share (devices, buckets). Existing groups keep theirs."""


def post(group: Any, memory: torch.Tensor, root: int = 0, timeout: timedelta | None = None) -> dist.Work:
    """Begin a broadcast of `memory` from rank `root`. `timeout`: the group's by default."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    if timeout is not None:
        options.timeout = timeout
    work: dist.Work = group.broadcast([memory], options)
    return work


class Gloo:
    """torch's own gloo groups over TCP. For broadcasts see `gloo_chain.py`."""

    def __init__(self, options: GlooOptions) -> None:
        self.require()
        self._address = own_address(options.interface)
        self._doors: Doorkeeper | None = None
        self._devices: dict[int, Any] = {}

    @staticmethod
    def require() -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise BackendUnavailable("checkpoint_engine.backend=gloo needs a torch that is built with gloo")

    def listen_at(self, host: str, doors: Doorkeeper) -> None:
        self._address, self._doors = host, doors

    def group(self, store: Store, rank: int, size: int, lane: Lane, timeout_s: float) -> Any:
        timeout = timedelta(seconds=timeout_s)
        return gloo_group(store, rank, size, device=self._device(lane.device), threads=lane.threads, timeout=timeout)

    def _device(self, number: int | None) -> Any:
        if number is None:
            # Pairs connect when they are first used: of all pairs a broadcast needs few.
            return self._new_device(lazy_init=True)
        # With `lazy_init`, groups that share a device take each other's connections for their own and hang.
        if number not in self._devices:
            self._devices[number] = self._new_device(lazy_init=False)
        return self._devices[number]

    def _new_device(self, *, lazy_init: bool) -> Any:
        """The device listens at once."""
        gloo: Any = dist.ProcessGroupGloo
        with self._doors.guarding() if self._doors else nullcontext():
            return gloo.create_device(hostname=self._address, lazy_init=lazy_init)


@dataclass
class _DeviceFlight:
    communicator: _OverDevice
    work: dist.Work
    memory: torch.Tensor
    staging: torch.Tensor
    sending: bool

    def is_done(self) -> bool:
        if not self.work.is_completed():
            return False
        with self.communicator.stream():
            self.work.wait()
            if not self.sending:
                self.memory.copy_(self.staging[: len(self.memory)])  # blocks until it is there: host memory is pageable
        self.communicator.free.append(self.staging)
        return True


class _OverDevice:
    """Host memory to a bucket in device memory, broadcast from device to device, and back. On a stream of its own."""

    def __init__(self, options: NcclOptions, kind: str) -> None:
        self._module: Any = torch.get_device_module(kind)
        self._device = torch.device(kind, self._module.current_device())
        self._stream = self._module.Stream(self._device)
        self._bucket_nbytes = options.bucket_megabytes * 2**20
        self.free: deque[torch.Tensor] = deque()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run on the stream of the sync, never on the one on which the trainer computes."""
        with self._module.device(self._device), self._module.stream(self._stream):
            yield

    def broadcast(self, group: Any, memory: torch.Tensor, *, sending: bool) -> Flight:
        with self.stream():
            staging = self._staging(len(memory))
            if sending:
                staging[: len(memory)].copy_(memory)
            return _DeviceFlight(self, post(group, staging[: len(memory)]), memory, staging, sending)

    def listen_at(self, host: str, doors: Doorkeeper) -> None:
        """Does nothing: NCCL and HCCL choose addresses, and authenticate by a secret that they share in the store."""

    def leave(self, group: Any) -> None:
        """Does nothing: a group is freed with its last reference."""

    def max_in_flight(self, per_owner: int, owners: int) -> int:
        """`per_owner` in all groups: each broadcast needs a bucket in device memory, and one order avoids deadlocks."""
        return per_owner

    def release(self) -> None:
        self.free.clear()

    def _staging(self, nbytes: int) -> torch.Tensor:
        if self.free and len(self.free[0]) >= nbytes:
            return self.free.popleft()
        return torch.empty(max(nbytes, self._bucket_nbytes), dtype=torch.uint8, device=self._device)


class Nccl(_OverDevice):
    def __init__(self, options: NcclOptions) -> None:
        self.require()
        super().__init__(options, "cuda")

    @staticmethod
    def require() -> None:
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise BackendUnavailable(
                "checkpoint_engine.backend=nccl needs a CUDA device and a torch with NCCL on every trainer rank and "
                f"rollout node: {extra('cuda')}. Without a device use checkpoint_engine.backend=gloo"
            )

    def group(self, store: Store, rank: int, size: int, lane: Lane, timeout_s: float) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # NCCL's watchdog ends the process when an operation times out: ours has to come first.
        set_timeout(options, timedelta(seconds=2 * timeout_s))
        return nccl(store, rank, size, options)


class Hccl(_OverDevice):
    def __init__(self, options: HcclOptions) -> None:
        self._group_class: Any = hccl_class(self.require())
        super().__init__(options, "npu")

    @staticmethod
    def require() -> Any:
        """Import and return torch_npu. Raises BackendUnavailable without it, or without an NPU."""
        try:
            import torch_npu
        except ModuleNotFoundError as exc:
            raise BackendUnavailable(
                f"checkpoint_engine.backend=hccl needs the package 'torch_npu': {extra('npu')}"
            ) from exc
        if not torch_npu.npu.is_available():
            raise BackendUnavailable(
                "checkpoint_engine.backend=hccl needs an NPU on every trainer rank and rollout node; "
                "without a device use checkpoint_engine.backend=gloo"
            )
        return torch_npu

    def group(self, store: Store, rank: int, size: int, lane: Lane, timeout_s: float) -> Any:
        options = self._group_class.Options()
        set_timeout(options, timedelta(seconds=2 * timeout_s))
        return self._group_class(store, rank, size, options)
