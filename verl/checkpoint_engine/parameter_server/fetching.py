"""How a rank gets the buckets that it is to broadcast: from its own host memory, or from a peer's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from verl.checkpoint_engine.backends.rendezvous import Deadline
from verl.checkpoint_engine.errors import TransportError, TransportTimeout
from verl.checkpoint_engine.parameter_server.buckets import Bucket
from verl.checkpoint_engine.parameter_server.buffers import HostBuffer
from verl.checkpoint_engine.parameter_server.p2p_store import P2PStore
from verl.checkpoint_engine.parameter_server.progress import Events, FirstFailure
from verl.checkpoint_engine.parameter_server.rank_device import Device
from verl.checkpoint_engine.parameter_server.records import RankMetas

STAMP_NBYTES = 8
POLL_S = 0.2
LANDING = "update/landing"
"""Names of what the P2P store has registered for reads to land in, while an update runs."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where bytes come from, for one rank and one update."""

    device: Device
    metas: Mapping[int, RankMetas]
    own: Sequence[HostBuffer]
    """Registered here."""
    own_incarnation: int
    """Of the owner in `metas` that is this rank itself (ranks of another job may have the same number); 0: none."""
    open_store: Callable[[], P2PStore | None]
    """This rank's P2P store, started when it is needed; None if it cannot have one."""
    deadline: Deadline
    stop: threading.Event
    """Ends reads."""

    def is_own(self, owner: int) -> bool:
        return self.own_incarnation != 0 and self.metas[owner].incarnation == self.own_incarnation

    def host_memory(self, bucket: Bucket, landing: torch.Tensor | None) -> torch.Tensor:
        """The bytes of `bucket` in host memory: where they are, or read into `landing`. Raises TransportError."""
        if self.is_own(bucket.owner):
            return self.own[bucket.buffer].memory[bucket.offset : bucket.offset + bucket.nbytes]
        assert landing is not None  # whoever has peers' buckets to fetch has made it
        memory = landing[: bucket.nbytes]
        self._read(bucket.owner, bucket.address, memory)
        return memory

    def check_stamp(self, owner: int, stamp: torch.Tensor) -> None:
        """Raises TransportError if `owner` no longer holds what its metas say. `stamp`: 8 registered bytes."""
        meta = self.metas[owner]
        self._read(owner, meta.stamp, stamp)
        if int(stamp.view(torch.int64).item()) != meta.incarnation:
            raise TransportError(
                f"rank {owner} at {meta.p2p_address} no longer holds what it held when metas were gathered: "
                "gather, or save, its metas again"
            )

    def _read(self, owner: int, source: int, memory: torch.Tensor) -> None:
        meta, store = self.metas[owner], self.open_store()
        if store is None or not meta.p2p_address:
            who = "this rank" if store is None else f"rank {owner}"
            raise TransportError(f"bytes of rank {owner} can only be read peer to peer, but {who} has no P2P store")
        if len(memory):
            store.batch_transfer_sync_read(
                meta.p2p_address,
                [source],
                [memory.data_ptr()],
                [len(memory)],
                max(self.deadline.remaining_s, 0.001),
                self.stop,
            )


class Fetcher:
    """Fetches this rank's buckets in order: with a staging buffer one ahead of what is taken, on its own thread.

    Use as a context manager: the memory goes with it.
    """

    def __init__(
        self,
        sources: Sources,
        buckets: Sequence[tuple[int, Bucket]],
        *,
        staged_nbytes: int,
        halves: Sequence[torch.Tensor],
        events: Events,
        failure: FirstFailure,
    ) -> None:
        """`buckets`: this rank's, with their numbers. `staged_nbytes`: of the staging buffer; 0: fetch into `halves`,
        which only then may have to be read into."""
        self._sources = sources
        self._buckets = list(buckets)
        self._events = events
        self._failure = failure
        self._halves = halves
        self._on_device = sources.device.kind != "cpu"
        self._peers = sorted({bucket.owner for _, bucket in buckets if not sources.is_own(bucket.owner)})
        self._stamp = torch.zeros(STAMP_NBYTES, dtype=torch.uint8)
        self._staging: torch.Tensor | None = None
        self._landing: torch.Tensor | None = None
        self._staged = staged_nbytes > 0
        if self._staged and self._on_device and buckets:
            self._staging = sources.device.empty(staged_nbytes)
        if self._peers and (self._staged or self._on_device):
            self._landing = sources.device.host_bounce(max(staged_nbytes, len(halves[0])))
        self._release_targets: Callable[[], None] = lambda: None
        self._ready: tuple[int, torch.Tensor] | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="parameter-server-fetch", daemon=True)

    def __enter__(self) -> Fetcher:
        store = self._sources.open_store() if self._peers else None
        if store is not None:
            places = [self._landing] if self._landing is not None else self._halves
            targets = {f"{LANDING}-{number}": memory for number, memory in enumerate((self._stamp, *places))}
            store.register_named_tensors(targets)
            self._release_targets = lambda: store.unregister_named_tensors(list(targets))
        if self._staged and self._buckets:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sources.stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()  # reads look at `stop`
        self._release_targets()
        self._staging = self._landing = self._ready = None
        self._halves = ()

    def take(self, number: int, bucket: Bucket, half: torch.Tensor) -> torch.Tensor:
        """The bytes of the next of this rank's buckets, on the device, borrowed until `release`. Maybe in `half`.

        Raises what went wrong, TransportTimeout.
        """
        if not self._staged:
            return self._fetch(number, bucket, half if self._landing is None else self._landing, half)
        with self._changed:
            while self._ready is None or self._ready[0] != number:
                self._failure.check()
                if self._sources.deadline.passed:
                    owner = self._sources.metas[bucket.owner]
                    raise TransportTimeout(
                        f"bucket {number} of rank {bucket.owner} on {owner.host} not fetched within "
                        f"{self._sources.deadline.timeout_s:.1f} s"
                    )
                self._changed.wait(min(POLL_S, self._sources.deadline.remaining_s))
            return self._ready[1]

    def release(self) -> None:
        """What was taken last is no longer used: the next bucket may be fetched."""
        with self._changed:
            self._ready = None
            self._changed.notify_all()

    def check_stamps(self) -> None:
        """Raises TransportError if one of the owners that were read has let go of the checkpoint."""
        for owner in self._peers:
            self._sources.check_stamp(owner, self._stamp)

    def _run(self) -> None:
        try:
            for number, bucket in self._buckets:
                with self._changed:
                    self._changed.wait_for(lambda: self._ready is None or self._sources.stop.is_set())
                if self._sources.stop.is_set():
                    return
                fetched = self._fetch(number, bucket, self._landing, self._staging)
                with self._changed:
                    self._ready = number, fetched
                    self._changed.notify_all()
        except Exception as exc:  # noqa: BLE001 - raised in the thread that waits for the bucket
            self._failure.set(exc)
            with self._changed:
                self._changed.notify_all()

    def _fetch(
        self, number: int, bucket: Bucket, landing: torch.Tensor | None, on_device: torch.Tensor | None
    ) -> torch.Tensor:
        self._events.record("fetch-start", number)
        fetched = self._sources.host_memory(bucket, landing)
        if self._on_device:
            assert on_device is not None  # the staging buffer, or a half
            fetched = on_device[: bucket.nbytes].copy_(fetched)
            self._sources.device.synchronize()
        self._events.record("fetch-end", number)
        return fetched
