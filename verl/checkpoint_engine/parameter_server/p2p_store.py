"""One rank's host memory, readable by peers, and reads from theirs. Over Mooncake's transfer engine.

A store has two engines. One serves and keeps its address for as long as the store lives. The other one reads, and is
thrown away when a read fails: with it ends whatever is still in flight, so that no late byte lands in memory that is
in use again, and those who read from here notice nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.errors import BackendUnavailable, ConfigError, TransportError, TransportTimeout
from verl.checkpoint_engine.links.network import own_address
from verl.checkpoint_engine.plan.types import Range
from verl.utils.admission import ANY_HOST, NOBODY, OWN_USER

if TYPE_CHECKING:
    import torch

    from verl.checkpoint_engine.backends.mooncake import MooncakeWire

MAX_READ_NBYTES = 16 * 2**20
"""Of one transfer. Several are in flight even where a whole batch is a bucket of 64 MiB."""
MAX_NBYTES_IN_FLIGHT = 256 * 2**20
MAX_IN_FLIGHT = 32
"""Small reads are bound by their latency; so many at once read 4 KiB pieces ten times as fast as one by one."""
POLL_S = 0.0002


class P2PStore:
    """One per rank. Reads are made from one thread at a time; registering and serving go on beside them."""

    def __init__(
        self, device_id: str | None, *, host: str | None = None, protocol: str = "tcp", rdma_devices: str = ""
    ) -> None:
        """Start to serve, on a free port. `device_id`: the rank's accelerator, for `device`.

        `rdma_devices`: comma-separated, all if empty; the first is the rank's own. `host`: address under which peers
        reach this one, None for that of the default route. Raises BackendUnavailable without Mooncake, TransportError
        if it does not start after a few attempts.
        """
        if protocol not in ("tcp", "rdma"):
            raise ConfigError(f"the P2P store's protocol must be tcp or rdma, not {protocol!r}")
        self._host = host or own_address(None)
        self._protocol = protocol
        self._rdma_devices = rdma_devices if protocol == "rdma" else ""
        self._device_id = device_id or ""
        self._server: MooncakeWire | None = self._start(serves=True)
        self._reader: MooncakeWire | None = None
        self._peers: dict[str, int] = {}
        """Addresses that the reading engine knows, and their numbers there."""
        self._targets: set[str] = set()
        """Names of the tensors that the reading engine may write to."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """`host:port`, what peers read from."""
        return self._serving().address().decode()

    @property
    def device(self) -> str:
        """The RDMA device of this rank; with TCP the id of its accelerator, as if each had a network card."""
        return self._rdma_devices.partition(",")[0] or self._device_id

    def register_named_tensors(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        """Let peers read the memory of these contiguous tensors, and reads from peers land in it.

        The store keeps them alive. Raises ConfigError for a name that is taken or a tensor that is not contiguous.
        """
        for name, tensor in named_tensors.items():
            if name in self._tensors:
                raise ConfigError(f"the P2P store has registered {name!r} already")
            if not tensor.is_contiguous():
                raise ConfigError(f"{name!r} is not contiguous, so it cannot be registered with the P2P store")
            self._serving().register(_bytes_of(tensor))
            with self._lock:
                self._tensors[name] = tensor

    def unregister_named_tensors(self, names: Sequence[str]) -> None:
        """Nobody may be reading from them. Raises ConfigError for a name that is not registered."""
        if unknown := [name for name in names if name not in self._tensors]:
            known = ", ".join(self._tensors) or "none"
            raise ConfigError(f"not registered with the P2P store: {', '.join(unknown)}; registered: {known}")
        for name in names:
            with self._lock:
                tensor = self._tensors.pop(name)
                if name in self._targets and self._reader is not None:
                    self._reader.deregister(_bytes_of(tensor))
                self._targets.discard(name)
            self._serving().deregister(_bytes_of(tensor))

    def batch_transfer_sync_read(
        self,
        address: str,
        sources: Sequence[int],
        targets: Sequence[int],
        nbytes: Sequence[int],
        timeout_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        """Copy `nbytes[i]` from `sources[i]`, an address in the process of the store at `address`, to `targets[i]`.

        Targets lie in registered tensors. Several reads are in flight at a time. `stop`, set from another thread, ends
        the wait. Raises TransportError naming `address` if a read fails, TransportTimeout after `timeout_s`; nothing is
        written any more then.
        """
        deadline = time.monotonic() + timeout_s
        waiting = deque(_reads(sources, targets, nbytes))
        try:
            reader = self._reading(targets, nbytes)
            if address not in self._peers:
                self._peers[address] = len(self._peers)
                reader.connect(self._peers[address], address.encode(), timeout_s)
            self._transfer(reader, self._peers[address], waiting, deadline, stop)
        except TransportTimeout as exc:
            self._end_reads()
            message = f"{exc.message}: the P2P store at {address}, within {timeout_s:.1f} s"
            raise TransportTimeout(message, phase="stage") from exc
        except TransportError as exc:
            self._end_reads()
            raise TransportError(f"reading from the P2P store at {address}: {exc.message}", phase="stage") from exc
        except BaseException:
            self._end_reads()
            raise

    def close(self) -> None:
        """End everything; peers can no longer read. Idempotent."""
        self._end_reads()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._tensors.clear()

    def _start(self, *, serves: bool) -> MooncakeWire:
        """Hosts of ranks that join later are not known; on this one, nobody but the same user reads."""
        try:
            from verl.checkpoint_engine.backends.mooncake import MooncakeWire
        except ImportError as exc:
            raise BackendUnavailable(
                f"the P2P store needs Mooncake ({exc}): pip install 'verl-sync[kimi]', and on Debian apt-get install "
                "libibverbs1 libnuma1 libcurl4"
            ) from exc
        admission = NOBODY if not serves else OWN_USER if self._host.startswith("127.") else ANY_HOST
        return MooncakeWire(host=self._host, protocol=self._protocol, devices=self._rdma_devices, admission=admission)

    def _serving(self) -> MooncakeWire:
        if self._server is None:
            raise TransportError("the P2P store is closed")
        return self._server

    def _reading(self, targets: Sequence[int], nbytes: Sequence[int]) -> MooncakeWire:
        """The engine that reads, which has the memory of all targets registered."""
        self._serving()
        if self._reader is None:
            self._reader = self._start(serves=False)
        with self._lock:
            spans = {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in self._tensors.items()}
        for target, size in zip(targets, nbytes, strict=True):
            name = next((name for name, (start, length) in spans.items() if 0 <= target - start <= length - size), None)
            if name is None:
                raise ConfigError(f"{size} bytes at {target:#x} are in no tensor registered with the P2P store")
            if name not in self._targets:
                self._reader.register(_bytes_of(self._tensors[name]))
                self._targets.add(name)
        return self._reader

    def _transfer(
        self,
        reader: MooncakeWire,
        peer: int,
        waiting: deque[Range],
        deadline: float,
        stop: threading.Event | None,
    ) -> None:
        flying: list[tuple[int, int]] = []
        in_flight = 0
        while waiting or flying:
            while waiting and len(flying) < MAX_IN_FLIGHT and in_flight + waiting[0].nbytes <= MAX_NBYTES_IN_FLIGHT:
                part = waiting.popleft()
                flying.append((reader.read(peer, part.src_offset, part.dst_offset, part.nbytes), part.nbytes))
                in_flight += part.nbytes
            left = [flight for flight in flying if not reader.is_done(flight[0])]
            if len(left) == len(flying):
                if stop is not None and stop.is_set():
                    raise TransportError("given up")
                if time.monotonic() > deadline:
                    raise TransportTimeout(f"{in_flight + sum(part.nbytes for part in waiting)} bytes have not come")
                time.sleep(POLL_S)
            flying = left
            in_flight = sum(size for _, size in flying)

    def _end_reads(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
            self._peers.clear()
            self._targets.clear()
        if reader is not None:
            reader.close()


def _bytes_of(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _reads(sources: Sequence[int], targets: Sequence[int], nbytes: Sequence[int]) -> Iterator[Range]:
    """Runs of addresses, joined where both ends touch, cut at `MAX_READ_NBYTES`."""
    runs: list[Range] = []
    for source, target, size in zip(sources, targets, nbytes, strict=True):
        last = runs[-1] if runs else None
        if last and last.src_offset + last.nbytes == source and last.dst_offset + last.nbytes == target:
            runs[-1] = Range(last.src_offset, last.dst_offset, last.nbytes + size)
        elif size:
            runs.append(Range(source, target, size))
    for run in runs:
        for start in range(0, run.nbytes, MAX_READ_NBYTES):
            size = min(MAX_READ_NBYTES, run.nbytes - start)
            yield Range(run.src_offset + start, run.dst_offset + start, size)
