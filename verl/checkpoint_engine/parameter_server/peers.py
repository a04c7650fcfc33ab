"""Read the host memory of peers over Mooncake's wire.

A rank has two wires. The serving one keeps its address for the life of the server. The reading one is closed when a
read fails. That ends all reads in flight, so that no late byte arrives in memory that is in use again; peers that read
from this rank are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..errors import BackendUnavailable, TransportError, TransportTimeout
from ..links.fetch import Bucket, FetchLoop, Stop
from ..links.network import own_address
from ..links.wire import OwnerAddress, Wire, WireReader
from ..plan.types import Range
from ..support.admission import ANY_HOST, NOBODY, OWN_USER
from ..support.package import extra
from .groups import is_inside
from .records import RankMetas

MAX_READ_NBYTES = 16 * 2**20
"""The most bytes of one transfer: several are in flight even for a bucket of 64 MiB."""
MAX_IN_FLIGHT = 16


def open_wire(protocol: str, rdma_device: str, *, serves: bool) -> Wire:
    """Open a Mooncake wire. Raises BackendUnavailable without Mooncake, TransportError if it does not start.

    `rdma_device`: empty with TCP. A serving wire admits all hosts, because ranks may join later, but on this host only
    the same user.
    """
    try:
        from ..backends.mooncake import MooncakeWire
    except ImportError as exc:
        raise BackendUnavailable(
            f"the P2P store needs Mooncake ({exc}): {extra('kimi')}, and on Debian apt-get install "
            "libibverbs1 libnuma1 libcurl4"
        ) from exc
    host = own_address(None)
    admission = NOBODY if not serves else OWN_USER if is_inside(host) else ANY_HOST
    return MooncakeWire(host=host, protocol=protocol, devices=rdma_device, admission=admission)


class PeerReader:
    """Reads from peers. Used from one thread at a time."""

    def __init__(self, new_wire: Callable[[], Wire]) -> None:
        self._new_wire = new_wire
        self._wire: Wire | None = None
        """Kept until a read fails, because starting one takes as long as reading a bucket."""
        self._peers: dict[str, int] = {}
        """Addresses that the wire is connected to, and their indices there."""

    @contextmanager
    def into(self, targets: Sequence[torch.Tensor]) -> Iterator[None]:
        """In this block, reads may write into `targets` (host, uint8). Raises TransportError, BackendUnavailable."""
        wire = self._wire = self._wire or self._new_wire()
        registered = []
        try:
            for memory in (target.numpy() for target in targets):
                wire.register(memory)
                registered.append(memory)
            yield
        finally:
            if self._wire is wire:  # else it is closed, and has none any more
                for memory in registered:
                    wire.deregister(memory)

    def read(self, owner: RankMetas, source: int, target: torch.Tensor, timeout_s: float, stop: Stop) -> None:
        """Fill `target` from address `source` in the process of `owner`. Called inside `into`.

        Another thread sets `stop` to end the wait. Raises TransportError naming the owner's address if a read fails,
        TransportTimeout after `timeout_s`; no read writes to `target` then.
        """
        assert self._wire is not None
        place, memory, nothing = owner.p2p_address, target.numpy(), np.zeros(0, np.uint8)
        arrived: list[Bucket] = []
        try:
            if place not in self._peers:
                self._peers[place] = len(self._peers)
                self._wire.connect(self._peers[place], place.encode(), timeout_s)
            number = self._peers[place]
            held = OwnerAddress(place.encode(), owner.incarnation, source, owner.stamp)
            FetchLoop(
                reader=WireReader(self._wire, {number: held}, memory, nothing, owner.incarnation),
                plan=None,
                region=memory,
                bounce=nothing,
                version=owner.incarnation,
                timeout_s=timeout_s,
                stop=stop,
                max_in_flight=MAX_IN_FLIGHT,
                on_bucket=arrived.append,
            ).run([Bucket(number, (part,), part.nbytes) for part in _parts(len(memory))])
        except TransportTimeout as exc:
            self.close()
            left = len(memory) - sum(bucket.nbytes for bucket in arrived)
            message = f"{left} bytes have not come: the P2P store at {place}, within {timeout_s:.1f} s"
            raise TransportTimeout(message, phase="stage") from exc
        except TransportError as exc:
            self.close()
            raise TransportError(f"reading from the P2P store at {place}: {exc.message}", phase="stage") from exc
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all reads in flight. Idempotent; the next `into` opens a new wire."""
        wire, self._wire = self._wire, None
        self._peers.clear()
        if wire is not None:
            wire.close()


def _parts(nbytes: int) -> list[Range]:
    """So many bytes in parts, which lie here as they do at their owner."""
    return [Range(start, start, min(MAX_READ_NBYTES, nbytes - start)) for start in range(0, nbytes, MAX_READ_NBYTES)]
