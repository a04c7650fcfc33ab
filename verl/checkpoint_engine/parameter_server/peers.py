"""Reads from the host memory of peers, over Mooncake's wire.

A rank has two wires. The one with which it serves keeps its address for as long as the server lives. The one with which
it reads is thrown away when a read fails: with it ends whatever is still in flight, so that no late byte lands in
memory that is in use again, and those who read from here notice nothing.
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
"""Of one transfer. Several are in flight even where a bucket has 64 MiB."""
MAX_IN_FLIGHT = 16


def open_wire(protocol: str, rdma_device: str, *, serves: bool) -> Wire:
    """`rdma_device`: empty with TCP. Raises BackendUnavailable without Mooncake, TransportError if it does not start.

    Hosts of ranks that join later are not known; on this one, nobody but the same user reads.
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
    """Used from one thread at a time."""

    def __init__(self, new_wire: Callable[[], Wire]) -> None:
        self._new_wire = new_wire
        self._wire: Wire | None = None
        """From the first read to one that fails: starting one takes as long as reading a bucket."""
        self._peers: dict[str, int] = {}
        """Addresses that the wire knows, and their numbers there."""

    @contextmanager
    def into(self, targets: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, reads may land in `targets` (host, uint8). Raises TransportError, BackendUnavailable."""
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
        """Copy what is at address `source` in the process of `owner` to `target`, all of it. Inside `into`.

        `stop`, set from another thread, ends the wait. Raises TransportError naming the owner's address if a read
        fails, TransportTimeout after `timeout_s`; nothing is written any more then.
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
        """End what is in flight. Idempotent; the next `into` begins anew."""
        wire, self._wire = self._wire, None
        self._peers.clear()
        if wire is not None:
            wire.close()


def _parts(nbytes: int) -> list[Range]:
    """So many bytes in parts, which lie here as they do at their owner."""
    return [Range(start, start, min(MAX_READ_NBYTES, nbytes - start)) for start in range(0, nbytes, MAX_READ_NBYTES)]
