"""A ParameterServer: checkpoints in the host memory of many ranks, moved into inference engines on demand.

server = ParameterServer(auto_pg=True)              # one per process, under torchrun
server.register_checkpoint("step-17", files=mine)   # every rank its own part
server.gather_metas("step-17")                      # every rank learns what every other one holds
server.update("step-17", request)                   # broadcast: into the engines of all ranks
server.update("step-17", request, ranks=[4, 5])     # P2P: into those of ranks 4 and 5, which pull and broadcast
server.unregister_checkpoint("step-17")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import torch

from ..errors import ConfigError
from ..links.rdma import choose_wire
from ..memory.host_memory import KeptMemory
from ..plan.encoded import unpacked
from ..support import envs
from .agreement import agree, raise_unless_same
from .collective_calls import CollectiveCalls
from .fetching import Sources
from .holdings import Holdings
from .peers import PeerReader, open_wire
from .progress import Event, Events, UpdateReport
from .rank_device import Device
from .records import RankMetas
from .transfer import Request, Transfer

DEFAULT_MEM_FRACTION = 0.9
DEFAULT_TIMEOUT_S = 600.0


class ParameterServer:
    """One rank of the server. Methods block and are called from one thread; `gather_metas` and `update` are collective.

    Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        auto_pg: bool = False,
        gpu_count: int | None = None,
        mem_fraction: float | None = None,
        master: str | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        p2p_protocol: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`rank` and `world_size`: by default those of torchrun's environment.

        `auto_pg`: make a process group for every update and drop it afterwards; else one is kept for each set of ranks.
        `gpu_count`: ranks (devices) per host. `mem_fraction`: the fraction of a device's free memory for buckets.
        `master`: `host:port` of the ranks' store, or `master_addr` and `master_port`; by default `MASTER_ADDR` and
        `MASTER_PORT`. A single rank needs none.
        `p2p_protocol`: tcp or rdma; None for rdma if the host has RDMA devices. `timeout_s`: for each whole
        `gather_metas` and `update`. Raises ConfigError.
        """
        self.rank = _given(rank, envs.rank, "rank", "RANK")
        self.world_size = _given(world_size, envs.world_size, "world_size", "WORLD_SIZE")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must be from 0 to world_size - 1 = {self.world_size - 1}, not {self.rank}")
        self.mem_fraction = DEFAULT_MEM_FRACTION if mem_fraction is None else mem_fraction
        if not 0 < self.mem_fraction <= 1:
            raise ConfigError(f"mem_fraction must be greater than 0 and at most 1, not {mem_fraction}")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, not {timeout_s}")
        self._device = Device.of(self.rank, self.world_size, gpu_count)
        if master is None and (master_addr is not None or master_port is not None):
            host, _, port = envs.master_address().rpartition(":")
            master = f"{master_addr or host}:{master_port or port}"
        protocol, rdma_device = choose_wire(p2p_protocol, self._device.local_rank, self._device.count)
        self._holdings = Holdings(
            rank=self.rank,
            world_size=self.world_size,
            device_id=self._device.id,
            rdma_device=rdma_device,
            new_wire=partial(open_wire, protocol, rdma_device, serves=True),
        )
        self._reader = PeerReader(partial(open_wire, protocol, rdma_device, serves=False))
        self._calls = CollectiveCalls(
            rank=self.rank,
            world_size=self.world_size,
            device=self._device.torch_device,
            master=master,
            keep_groups=not auto_pg,
            timeout_s=timeout_s,
        )
        self._metas: dict[int, RankMetas] = {}
        self._metas_name: str | None = None
        """The checkpoint of the metas; None if they were loaded."""
        self._events = Events(self.rank)
        self._kept = KeptMemory()

    @property
    def device_id(self) -> str:
        """The id of this rank's device, by which its engine knows it."""
        return self._device.id

    # ------------------------------------------------------------------ checkpoints

    def register_checkpoint(
        self,
        checkpoint_name: str,
        *,
        files: Sequence[str | Path] | None = None,
        named_tensors: Mapping[str, torch.Tensor] | None = None,
        use_shared_memory_pool: bool = False,
        use_inplace_pin_memory: bool = True,
    ) -> None:
        """Load this rank's part of a checkpoint into its host memory, from safetensors files and tensors (copied).

        `use_shared_memory_pool` and `use_inplace_pin_memory` are checkpoint-engine's and have no effect: the next
        checkpoint of the same layout always reuses the memory of an unregistered one, and files are only read.

        Not collective. Raises ConfigError for bad files, too little memory, or a used name.
        """
        self._holdings.register(checkpoint_name, [Path(file) for file in files or ()], named_tensors)

    def unregister_checkpoint(self, checkpoint_name: str, force: bool = False) -> None:
        """Unregister a checkpoint. Its memory is kept for the next registration unless `force`. Raises ConfigError."""
        self._holdings.unregister(checkpoint_name, keep_memory=not force)

    def gather_metas(self, checkpoint_name: str) -> None:
        """Gather every rank's record of a checkpoint. All ranks call it; a rank may hold no part.

        Raises ConfigError if no rank has registered it, TransportError, TransportTimeout naming the missing ranks.
        """
        name = checkpoint_name
        own = msgspec.msgpack.encode((name, self._holdings.metas(name)))
        self._device.make_current()
        with self._calls.begin(tuple(range(self.world_size))) as together:
            answers = [own]
            if together.group is not None:
                device, check = self._device.torch_device, together.failure.check
                answers = together.group.all_gather(own, device, together.deadline, check)
            told = [unpacked(answer, tuple[str, RankMetas], "the metas of a rank") for answer in answers]
            raise_unless_same({meta.rank: other for other, meta in told}, "gathers the metas of checkpoint")
            if not any(meta.incarnation for _, meta in told):
                raise ConfigError(f"checkpoint {name!r} is not registered on any of the {self.world_size} ranks")
            together.roster.exchange("gathering metas", None, together.deadline)
        self._metas = {meta.rank: meta for _, meta in told}
        self._metas_name = name

    def get_metas(self) -> dict[int, RankMetas]:
        """The records of the last `gather_metas` or `load_metas`, by rank. `metas.save_metas` writes them."""
        return dict(self._metas)

    def load_metas(self, metas: Mapping[int, RankMetas]) -> None:
        """Set the owners' records for P2P updates to `metas`, of this job or another one.

        They describe the senders only: every update collects the receivers and their devices.
        """
        self._metas = dict(metas)
        self._metas_name = None

    # ------------------------------------------------------------------ updates

    def update(
        self,
        checkpoint_name: str,
        req_func: Request,
        ranks: Sequence[int] | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> UpdateReport | None:
        """Move a checkpoint into the engines of all ranks (broadcast), or of `ranks` (P2P).

        Called on all ranks with the same arguments, after `gather_metas`, or for P2P `load_metas`; ranks outside
        `ranks` return None at once. Every updating rank calls `req_func` on a thread of its own, with (device id,
        socket path) of every updating rank in order. It requests this rank's engine, if any, to receive, and returns
        when the engine is done. A socket path is valid on its rank's host.

        Raises the same first error on every updating rank: ConfigError, PlanError, TransportError, TransportTimeout
        (after `timeout`, by default `timeout_s`), ActivationError. Engines are aborted then; the next update can
        follow.
        """
        receivers = self._receivers(ranks)
        if self.rank not in receivers:
            return None
        name, held = checkpoint_name, self._holdings[checkpoint_name]
        events = self._events = Events(self.rank)
        self._device.make_current()
        with self._calls.begin(receivers, timeout_s=_seconds(timeout)) as together:
            size, order = agree(
                together,
                name=name,
                device=self._device,
                usable_nbytes=int((self._device.free_nbytes() + self._kept.nbytes) * self.mem_fraction),
                own=self._holdings.metas(name),
                metas=self._metas,
                metas_name=self._metas_name,
                p2p=bool(ranks),
            )
            sources = Sources(
                device=self._device,
                metas=self._metas,
                own=held.buffers,
                own_incarnation=held.incarnation,
                reader=self._reader,
                deadline=together.own_deadline,
                stop=together.failure.stop,
            )
            Transfer(
                rank=self.rank,
                sources=sources,
                size=size,
                order=order,
                together=together,
                request=req_func,
                events=events,
                kept=self._kept,
            ).run()
        return UpdateReport(
            name=name,
            mode="p2p" if ranks else "broadcast",
            ranks=receivers,
            nbytes=sum(bucket.nbytes for _, bucket in order),
            buckets=len(order),
            bucket_nbytes=size.nbytes,
            staged=size.staged,
            seconds=together.deadline.timeout_s - together.deadline.remaining_s,
            events=events.in_order(),
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """This rank's events in the active or the last update. Any thread may read it."""
        return self._events.in_order()

    def init_process_group_for_ranks(self, ranks: Sequence[int]) -> None:
        """Connect `ranks` before their first update, and keep the group. Other ranks return at once."""
        receivers = self._receivers(ranks)
        if self.rank in receivers:
            self._device.make_current()
            with self._calls.begin(receivers, keep=True) as together:
                together.roster.exchange("connecting", None, together.deadline)

    def init_process_group(self, *, timeout: timedelta | None = None) -> None:
        """Make torch's default process group, for the caller's own collectives. All ranks call it.

        A ParameterServer itself does not use it: no update needs this call.
        """
        self._device.make_current()
        self._calls.init_default_group(_seconds(timeout))

    def store_based_barrier(self, timeout: timedelta | None = None) -> None:
        """Return when all ranks have called it; needs no process group. Raises TransportTimeout naming a rank."""
        with self._calls.begin(tuple(range(self.world_size)), timeout_s=_seconds(timeout)) as together:
            together.roster.exchange("a barrier", None, together.deadline)

    def close(self) -> None:
        """Leave all groups, free all checkpoints, and close the P2P store. Idempotent; not collective."""
        self._calls.close()
        self._reader.close()
        self._holdings.close()
        self._kept.release()
        self._metas, self._metas_name = {}, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receivers(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        if not ranks:
            return tuple(range(self.world_size))
        if len(set(ranks)) < len(ranks) or not all(0 <= rank < self.world_size for rank in ranks):
            raise ConfigError(f"ranks must be different ones from 0 to {self.world_size - 1}, not {list(ranks)}")
        return tuple(sorted(ranks))


def _seconds(timeout: timedelta | None) -> float | None:
    return timeout.total_seconds() if timeout is not None else None


def _given(argument: int | None, environment: Callable[[], int | None], name: str, variable: str) -> int:
    try:
        value = environment() if argument is None else argument
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    if value is None:
        raise ConfigError(f"a ParameterServer needs {name}: as an argument, or as {variable} in the environment")
    return value
