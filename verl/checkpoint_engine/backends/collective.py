"""`gloo`, `nccl`, `hccl`: every trainer rank broadcasts the pieces that it owns to all rollout nodes.

    owner r ──┬─> node 0      one process group per owner, the owner being rank 0: several senders, no funnel;
              └─> node 1      nodes sit in the groups of all owners

The groups are built straight over a store of their own (hosted by trainer 0, on a free port, under a name that is new
with every `prepare`), so that nothing global of torch.distributed is touched and several engines fit into one process.

Every stage begins with a header broadcast in each group: version, layout and size. A node that is sent anything but the
version which it was asked to stage refuses it before a byte of weights lands. A group whose transfer failed is never
used again, for what is left in its connections cannot be told apart from what comes next: the manager prepares anew.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore

from verl.checkpoint_engine.arena import NodeArena
from verl.checkpoint_engine.base import Capabilities, CheckpointEngineWithCache
from verl.checkpoint_engine.config import CheckpointEngineConfig, GlooOptions, HcclOptions, NcclOptions
from verl.checkpoint_engine.errors import BackendUnavailable, CheckpointEngineError, TransportError, TransportTimeout
from verl.checkpoint_engine.packed import PackedRegion
from verl.checkpoint_engine.pipeline import Bucket, FetchLoop, Publication, messages_of, publish
from verl.checkpoint_engine.plan import SyncPlan
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.topology import Topology, broadcast
from verl.checkpoint_engine.types import Member, Range
from verl.utils import config as strict

POLL_S = 0.001
"""A bucket takes ten times as long, and the next one is under way meanwhile."""
OWN_SHARE = 0.9
"""Of a phase's deadline: the member that waits knows for whom, so its error should come before the manager's."""
MAX_LANES = 8
"""Owners from which a node receives at the same time."""


# --- communicators ----------------------------------------------------------------------------------------------------


class Flight(Protocol):
    """One broadcast under way."""

    def is_done(self) -> bool:
        """Whether the bytes have left, or arrived. Raises RuntimeError if they will not."""


class Communicator(Protocol):
    """What differs between the three: how a group is made, and whether bytes take a detour through a device."""

    def group(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        """A group of `size` members; its operations give up after `timeout_s`. Raises RuntimeError."""

    def broadcast(self, group: Any, memory: torch.Tensor, *, sending: bool) -> Flight:
        """Begin to send `memory` (host, uint8), or to receive into it, from rank 0 of `group`. Borrowed until done."""

    def max_in_flight(self, per_owner: int, owners: int) -> int:
        """How many broadcasts a node has under way in all its groups together."""


def _post(group: Any, memory: torch.Tensor) -> dist.Work:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    work: dist.Work = group.broadcast([memory], options)
    return work


@dataclass
class _HostFlight:
    work: dist.Work

    def is_done(self) -> bool:
        if not self.work.is_completed():
            return False
        self.work.wait()  # returns at once; raises what went wrong
        return True


class Gloo:
    """torch's gloo over TCP, from and into host memory without a copy."""

    def __init__(self, options: GlooOptions) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise BackendUnavailable("checkpoint_engine.backend=gloo needs a torch that is built with gloo")
        self._address = own_address(options.interface)

    def group(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # Pairs connect when they are first used: of all pairs a broadcast needs few.
        options._devices = [gloo.create_device(hostname=self._address, lazy_init=True)]
        options._threads = 2
        options._timeout = timedelta(seconds=timeout_s)
        return gloo(store, rank, size, options)

    def broadcast(self, group: Any, memory: torch.Tensor, *, sending: bool) -> Flight:
        return _HostFlight(_post(group, memory))

    def max_in_flight(self, per_owner: int, owners: int) -> int:
        return per_owner * min(owners, MAX_LANES)


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
            return _DeviceFlight(self, _post(group, staging[: len(memory)]), memory, staging, sending)

    def max_in_flight(self, per_owner: int, owners: int) -> int:
        """Each has a bucket in device memory. Nodes post in the same order, so that groups do not wait crosswise."""
        return per_owner

    def _staging(self, nbytes: int) -> torch.Tensor:
        if self.free and len(self.free[0]) >= nbytes:
            return self.free.popleft()
        return torch.empty(max(nbytes, self._bucket_nbytes), dtype=torch.uint8, device=self._device)


class Nccl(_OverDevice):
    def __init__(self, options: NcclOptions) -> None:
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise BackendUnavailable(
                "checkpoint_engine.backend=nccl needs a CUDA device and a torch with NCCL on every trainer rank and "
                "rollout node: pip install 'verl-sync[cuda]'; without a device use checkpoint_engine.backend=gloo"
            )
        super().__init__(options, "cuda")

    def group(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # NCCL's watchdog ends the process when an operation times out: ours has to come first.
        options._timeout = timedelta(seconds=2 * timeout_s)
        return nccl(store, rank, size, options)


class Hccl(_OverDevice):
    def __init__(self, options: HcclOptions) -> None:
        try:
            import torch_npu
        except ModuleNotFoundError as exc:
            raise BackendUnavailable(
                "checkpoint_engine.backend=hccl needs the package 'torch_npu': pip install 'verl-sync[npu]'"
            ) from exc
        if not torch_npu.npu.is_available():
            raise BackendUnavailable(
                "checkpoint_engine.backend=hccl needs an NPU on every trainer rank and rollout node; "
                "without a device use checkpoint_engine.backend=gloo"
            )
        self._group_class: Any = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        super().__init__(options, "npu")

    def group(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        options = self._group_class.Options()
        options._timeout = timedelta(seconds=2 * timeout_s)
        return self._group_class(store, rank, size, options)


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass
class _Broadcasts:
    """A `RangeReader` over the owners' groups: a message is received where its range belongs."""

    communicator: Communicator
    groups: Mapping[int, Any]
    slot: torch.Tensor
    bounce: torch.Tensor
    version: int

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> tuple[int, Flight]:
        (message,) = ranges
        memory = (self.bounce if bounce else self.slot)[message.dst_offset : message.dst_offset + message.nbytes]
        return owner, self.communicator.broadcast(self.groups[owner], memory, sending=False)

    def is_done(self, transfer: tuple[int, Flight]) -> bool:
        owner, flight = transfer
        with _failures(f"the broadcast of trainer-{owner}", self.version):
            return flight.is_done()

    def cancel(self, transfer: tuple[int, Flight]) -> None:
        """A broadcast cannot be taken back: it keeps its memory, and the arena gives that slot up."""


class CollectiveEngine(CheckpointEngineWithCache):
    """What the three have in common, which is all but the communicator."""

    name: ClassVar[str]
    options_class: ClassVar[type[GlooOptions]]
    communicator_class: ClassVar[type[Any]]

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._options = strict.from_mapping(
            self.options_class, config.engine_kwargs.get(self.name, {}), f"checkpoint_engine.engine_kwargs.{self.name}"
        )
        self._communicator: Communicator = self.communicator_class(self._options)
        self._stop = threading.Event()
        self._plan: SyncPlan | None = None
        self._region: PackedRegion | None = None
        self._published: int | None = None
        self._messages: dict[int, list[Bucket]] = {}
        self._bounce = torch.empty(0, dtype=torch.uint8)
        self._server: TCPStore | None = None
        self._groups: dict[int, Any] = {}
        self._members: _Members | None = None

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        self.finalize()
        self._plan = plan
        sends = self.member.role == "trainer"
        bucket_nbytes = min(self.config.bucket_nbytes, self._options.bucket_megabytes * 2**20)
        owners = [self.member.index] if sends else range(plan.num_owners)
        self._messages = {owner: messages_of(plan, owner, bucket_nbytes) for owner in owners if plan.pieces_of(owner)}
        if not sends:
            bounced = (bucket.ranges[0].nbytes for per in self._messages.values() for bucket in per if bucket.scatter)
            self._bounce = torch.zeros(max(bounced, default=0), dtype=torch.uint8)
            return ""
        self._region = PackedRegion(plan, self.member.index)
        return self._host_store() if self.member.index == 0 else ""

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return broadcast(trainers, nodes)

    def init_process_group(self, topology: Topology) -> None:
        self._stop.clear()
        deadline = _Deadline(self.config.deadlines.prepare_s * OWN_SHARE)
        names = [member.name for member in (*topology.trainers, *topology.nodes)]
        members = _Members(self.member.name, names)

        def connect() -> dict[int, Any]:
            address = topology.trainers[0].address
            with _failures(f"connecting to trainer-0 at {address}", None, "prepare"):
                members.join(self._server, address, deadline, self._stop)
                return self._make_groups(members.store, topology)

        # On a thread of its own, because a store does not keep its timeouts when the process that hosts it is stopped.
        connecting = _Attempt(connect)
        while not connecting.done.wait(POLL_S):
            if self._stop.is_set() or deadline.passed:
                raise members.not_connected(deadline)
        self._groups = connecting.result()
        self._members = members

    def _make_groups(self, store: Store, topology: Topology) -> dict[int, Any]:
        """One group per owner that has anything to send to this member, or that this member is; all in use once."""
        groups = {}
        for owner in self._messages:
            names = topology.group_of(f"trainer-{owner}")
            own = PrefixStore(f"trainer-{owner}", store)
            rank = names.index(self.member.name)
            groups[owner] = self._communicator.group(own, rank, len(names), self.config.deadlines.stage_s)
        # Connections are made on first use; a stage should find them made.
        sending = self.member.role == "trainer"
        greetings = [
            self._communicator.broadcast(group, torch.zeros(1, dtype=torch.uint8), sending=sending)
            for group in groups.values()
        ]
        while not all(greeting.is_done() for greeting in greetings):
            time.sleep(POLL_S)
        return groups

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._plan is not None  # the manager prepares every member before it publishes
        assert self._region is not None
        self._published = None
        publication = publish(source, self._plan, self.member.index, [self._region])
        self._published = version
        return publication

    def serve_weights(self, version: int) -> None:
        self._stop.clear()
        if self._published != version:
            message = f"asked for version {version}, but version {self._published} is what was published"
            raise TransportError(message, version=version, phase="stage")
        deadline = _Deadline(self.config.deadlines.stage_s * OWN_SHARE)
        for owner, messages in self._messages.items():
            with self._transfer(version):
                self._send(version, owner, messages, deadline)

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        self._stop.clear()
        assert self._plan is not None
        deadline = _Deadline(self.config.deadlines.stage_s * OWN_SHARE)
        if not self._messages:
            return 0
        with self._transfer(version):
            self._await_headers(version, deadline)
            slot = arena.writable_view().bytes
            loop = FetchLoop(
                reader=_Broadcasts(self._communicator, self._groups, slot, self._bounce, version),
                plan=self._plan,
                region=slot.numpy(),
                bounce=self._bounce.numpy(),
                version=version,
                timeout_s=deadline.remaining_s,
                stop=self._stop,
                max_in_flight=self._communicator.max_in_flight(self._options.in_flight, len(self._messages)),
                poll_s=POLL_S,
            )
            return loop.run([bucket for messages in self._messages.values() for bucket in messages])

    def interrupt(self) -> None:
        self._stop.set()

    def finalize(self) -> None:
        self._groups.clear()
        self._members = None
        self._server = None
        self._region = None
        self._published = None
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def _host_store(self) -> str:
        host = own_address(self._options.interface)
        with _failures("opening a store", None, "prepare"):
            timeout = timedelta(seconds=self.config.deadlines.prepare_s)
            self._server = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        return f"{host}:{self._server.port}/{uuid.uuid4().hex}"

    @contextmanager
    def _transfer(self, version: int) -> Iterator[None]:
        """Whatever goes wrong inside, the groups are given up."""
        if self._members is None or self._messages.keys() - self._groups.keys():
            raise TransportError("not connected, or no longer after a failure", version=version, phase="stage")
        try:
            with _failures("a broadcast", version), self._members.taking_part():
                yield
        except BaseException as exc:
            if isinstance(exc, TransportTimeout):
                exc.message += self._members.missing()
            # A group is gone only when its last operation has ended, at the latest after the stage's deadline.
            # Nobody waits for that here.
            given_up, self._groups = self._groups, {}
            threading.Thread(target=given_up.clear, name="weight-sync-given-up", daemon=True).start()
            raise

    def _send(self, version: int, owner: int, messages: Sequence[Bucket], deadline: _Deadline) -> None:
        assert self._region is not None
        flying: deque[Flight] = deque()
        memories = [self._header(version, owner)]
        for bucket in messages:
            start = bucket.ranges[0].src_offset
            memories.append(self._region.bytes[start : start + bucket.ranges[0].nbytes])
        for memory in memories:
            if len(flying) == self._options.in_flight:
                self._wait({owner: flying.popleft()}, version, deadline)
            flying.append(self._communicator.broadcast(self._groups[owner], memory, sending=True))
        while flying:
            self._wait({owner: flying.popleft()}, version, deadline)

    def _await_headers(self, version: int, deadline: _Deadline) -> None:
        """Every owner's header, compared with the one that this node expects. Raises TransportError if they differ."""
        headers = {owner: torch.zeros(HEADER.size, dtype=torch.uint8) for owner in self._messages}
        self._wait(
            {
                owner: self._communicator.broadcast(self._groups[owner], header, sending=False)
                for owner, header in headers.items()
            },
            version,
            deadline,
        )
        for owner, header in headers.items():
            if not torch.equal(header, self._header(version, owner)):
                sent = HEADER.unpack(header.numpy().tobytes())[0]
                what = f"version {sent}" if sent != version else "another layout or other buckets"
                message = f"trainer-{owner} sends {what} where version {version} is expected"
                raise TransportError(message, version=version, phase="stage")

    def _header(self, version: int, owner: int) -> torch.Tensor:
        assert self._plan is not None
        messages = self._messages[owner]
        fields = (version, len(messages), sum(bucket.nbytes for bucket in messages))
        packed = HEADER.pack(*fields, bytes.fromhex(self._plan.layout.digest))
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _wait(self, flights: Mapping[int, Flight], version: int, deadline: _Deadline) -> None:
        """Until all have landed. `flights` are by owner."""
        waiting = dict(flights)
        while True:
            for owner, flight in list(waiting.items()):
                with _failures(f"the broadcast of trainer-{owner}", version):
                    if flight.is_done():
                        del waiting[owner]
            if not waiting:
                return
            if self._stop.is_set():
                raise TransportError("given up by the manager", version=version, phase="stage")
            if deadline.passed:
                owners = ", ".join(f"trainer-{owner}" for owner in waiting)
                message = f"the broadcast of {owners} not done within {deadline.timeout_s:.1f} s"
                raise TransportTimeout(message, version=version, phase="stage")
            time.sleep(POLL_S)


HEADER = struct.Struct("<qqq16s")
"""Version, number of messages, bytes of weights, digest of the layout."""


class GlooEngine(CollectiveEngine):
    name = "gloo"
    options_class = GlooOptions
    communicator_class = Gloo
    capabilities = Capabilities(
        staged=True,
        one_sided=False,
        elastic=False,
        same_host=False,
        device_types=("cpu", "cuda", "npu"),
        topologies=("broadcast",),
    )


class NcclEngine(CollectiveEngine):
    """Written to the same contract; it takes two CUDA devices to run it."""

    name = "nccl"
    options_class = NcclOptions
    communicator_class = Nccl
    capabilities = Capabilities(
        staged=True,
        one_sided=False,
        elastic=False,
        same_host=False,
        device_types=("cuda",),
        topologies=("broadcast",),
    )


class HcclEngine(CollectiveEngine):
    """Written to the same contract; it takes two NPUs to run it."""

    name = "hccl"
    options_class = HcclOptions
    communicator_class = Hccl
    capabilities = Capabilities(
        staged=True,
        one_sided=False,
        elastic=False,
        same_host=False,
        device_types=("npu",),
        topologies=("broadcast",),
    )


# --- small things -----------------------------------------------------------------------------------------------------


class _Attempt:
    """Work on a daemon thread, which is left behind if it never ends."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="weight-sync-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as exc:  # noqa: BLE001 - raised by `result`, where it belongs
            self._error = exc
        self.done.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class _Members:
    """Who is there. In a collective a member that stops looks, to each of the others, like another one's fault.

    Every member keeps changing its entry in the store for as long as it takes part in a stage, on a thread of its own,
    and watches the others do so. That thread alone talks to the store: it may hang when the store's host does.
    """

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self._name, self._names = name, list(names)
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Each member's last entry, and when it was new."""
        self._answered = time.monotonic()
        self._stage = 0
        self.store: Store

    def join(self, server: TCPStore | None, address: str, deadline: _Deadline, stop: threading.Event) -> None:
        """Connect to the store and wait until everybody has, so that making groups waits for nobody."""
        place, _, epoch = address.partition("/")
        host, _, port = place.rpartition(":")
        timeout = timedelta(seconds=deadline.timeout_s)
        store = server or TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
        self.store = PrefixStore(epoch, store)
        self.store.set(self._name, "here")
        while True:
            for name in self._names:
                if name not in self._seen and self.store.check([name]):
                    self._seen[name] = (b"here", time.monotonic())
            self._answered = time.monotonic()
            if len(self._seen) == len(self._names):
                return
            if stop.is_set() or deadline.passed:
                raise self.not_connected(deadline)
            time.sleep(POLL_S)

    def not_connected(self, deadline: _Deadline) -> TransportTimeout:
        absent = [name for name in self._names if name not in self._seen]
        if time.monotonic() - self._answered > QUIET_S:
            absent = self._names[:1]
        who = ", ".join(absent) or "the groups"
        here = ", ".join(name for name in self._names if name in self._seen) or "none"
        return TransportTimeout(f"{who} not connected within {deadline.timeout_s:.1f} s; done: {here}", phase="prepare")

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        left = threading.Event()
        self._stage += 1
        self._answered = began = time.monotonic()
        self._seen = {name: (entry, began) for name, (entry, _) in self._seen.items()}
        threading.Thread(target=self._pulse, args=(left, self._stage), name="weight-sync-pulse", daemon=True).start()
        try:
            yield
        finally:
            left.set()

    def _pulse(self, left: threading.Event, stage: int) -> None:
        # Once the store is gone, so is trainer-0: `missing` will say that nothing was heard.
        with suppress(RuntimeError):
            while not left.wait(PULSE_S):
                self.store.set(self._name, str(time.monotonic()))
                entries = self.store.multi_get(self._names)
                now = time.monotonic()
                for name, entry in zip(self._names, entries, strict=True):
                    if self._seen[name][0] != entry:
                        self._seen[name] = (entry, now)
                self._answered = now
            self.store.set(self._name, f"left {stage}")

    def missing(self) -> str:
        """`; no sign of life from node-1`, for messages; empty if all are there."""
        now = time.monotonic()
        left = f"left {self._stage}".encode()
        quiet = [name for name, (entry, at) in self._seen.items() if entry != left and now - at > QUIET_S]
        if now - self._answered > QUIET_S:
            quiet = self._names[:1]
        return f"; no sign of life from {', '.join(quiet)}" if quiet else ""


PULSE_S = 0.2
QUIET_S = 5 * PULSE_S
"""A member that was not heard for so long is named when a deadline has passed."""


@dataclass
class _Deadline:
    timeout_s: float
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.timeout_s

    @property
    def remaining_s(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


@contextmanager
def _failures(what: str, version: int | None, phase: str = "stage") -> Iterator[None]:
    """torch raises RuntimeErrors of many kinds; here they become ours, saying what was under way."""
    try:
        yield
    except CheckpointEngineError:
        raise
    except RuntimeError as exc:
        raise TransportError(f"{what} failed: {exc}", version=version, phase=phase) from exc


def own_address(interface: str | None) -> str:
    """The IPv4 address under which other hosts reach this one. Raises BackendUnavailable that lists the interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            if interface is not None:
                request = struct.pack("256s", interface.encode())
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
            probe.connect(("192.0.2.1", 9))  # sends nothing; the address is reserved for documentation
            return str(probe.getsockname()[0])
        except OSError as exc:
            if interface is None:
                return "127.0.0.1"  # no route to anywhere: members can only be on this host
            present = ", ".join(name for _, name in socket.if_nameindex())
            raise BackendUnavailable(
                f"network interface {interface!r} has no IPv4 address on {socket.gethostname()}; there are: {present}"
            ) from exc


SIOCGIFADDR = 0x8915
