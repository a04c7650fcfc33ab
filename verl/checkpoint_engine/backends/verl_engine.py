"""Host backends written for verl 0.9, which move whole tensors between trainer ranks and rollout nodes.

    prepare() -> metadata                                every member
    build_topology(ranks, nodes, metadata)               driver: arguments of the next call, a list of values for each
    init_process_group(**arguments)                      every member
    await send_weights(weights)                          every rank; `weights` gives (name, tensor), also `async for`
    async for name, tensor in receive_weights()          every node
    finalize()                                           every member, after every version

`hosted` makes a `CheckpointEngine` from such a class. Ranks publish as for every backend. Each then reads the shards of
the others over the wire `tcp`, some tensors at a time, so that its engine sends whole tensors. Nodes write the tensors
that their engine receives into the open slot; verify, commit and activate are as for every backend. Tensors are in host
memory. Interface: https://github.com/volcengine/verl, `verl/checkpoint_engine/base.py` of 0.9, as documented there.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from ..checkpoint_engine import Capabilities, CheckpointEngine, CheckpointEngineWithCache
from ..config import CheckpointEngineConfig
from ..errors import CheckpointEngineError, ConfigError, TransportError, TransportTimeout
from ..links.attempt import Attempt
from ..links.fetch import FetchLoop, bounce_nbytes, messages_of, moved_to
from ..links.network import own_address
from ..links.wire import OwnerAddress, WireReader
from ..memory.arena import NodeArena
from ..memory.packed import PackedRegion
from ..memory.publishing import Publication, publish
from ..plan.encoded import parsed
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology, direct
from ..plan.types import Member, Range, TensorSpec
from ..ports import WeightSource
from ..support import config as strict
from ..support.admission import Admission
from ..support.registry import require_methods
from .tcp import TcpWire

METHODS = ("prepare", "build_topology", "init_process_group", "send_weights", "receive_weights", "finalize")
OWN_SHARE = 0.9
"""A member's fraction of a phase's deadline: its error names the engine's method, so it must precede the manager's."""
LOOK_S = 0.05
"""The interval at which a member that waits for its engine checks for an interrupt or its deadline."""
CONNECTIONS = 4
READ_NBYTES = 64 * 2**20

T = TypeVar("T")


class EngineOfVerl(Protocol):
    """How methods are called whose arguments verl chooses; a class chooses those of `init_process_group`."""

    @classmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any: ...

    def send_weights(self, weights: Any) -> Any: ...

    def receive_weights(self) -> Any: ...

    def finalize(self) -> None: ...


def is_for_verl(engine_class: type[Any]) -> bool:
    """Whether `engine_class` has verl's methods rather than those of `CheckpointEngine`."""
    prepare = getattr(engine_class, "prepare", None)
    return prepare is not None and len(inspect.signature(prepare).parameters) <= 1


@cache
def hosted(name: str, engine_class: type[Any]) -> type[CheckpointEngine]:
    """The backend that hosts `engine_class` under `name`. Raises ConfigError naming the methods or arguments that it
    lacks."""
    abstract: frozenset[str] = getattr(engine_class, "__abstractmethods__", frozenset())
    lacking = [method for method in METHODS if method in abstract or not hasattr(engine_class, method)]
    if lacking:
        raise ConfigError(f"checkpoint_engine.backend={name}: {engine_class.__name__} lacks {', '.join(lacking)}")
    try:
        require_methods(engine_class, EngineOfVerl, f"checkpoint_engine.backend={name}")
    except strict.ConfigError as exc:
        raise ConfigError(str(exc)) from exc
    return type(f"Hosted{engine_class.__name__}", (VerlEngine,), {"name": name, "engine_class": engine_class})


class Address(msgspec.Struct, frozen=True):
    """The content of `Member.address`, as JSON. It has pickles: members of a job trust each other, as Ray's do."""

    metadata: str
    """Pickled, base64: the result of the engine's `prepare`, later the arguments of its `init_process_group`."""
    owner: OwnerAddress | None = None
    """Set on trainer ranks: the memory that other ranks read."""


class VerlEngine(CheckpointEngineWithCache):
    """Runs an engine of `engine_class`, written for verl, on one member."""

    name: ClassVar[str]
    engine_class: ClassVar[type[Any]]
    capabilities = Capabilities(
        one_sided=False, same_host=False, device_types=("cpu", "cuda", "npu"), connects_once=True
    )

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._engine: Any = None
        self._plan: SyncPlan | None = None
        self._region: PackedRegion | None = None
        self._wires: list[TcpWire] = []
        """Set on trainer ranks: the wire that others read, and the wire that reads."""
        self._owners: dict[int, OwnerAddress] = {}

    @classmethod
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        cls.arguments_of(config, is_master=False)

    @classmethod
    def arguments_of(cls, config: CheckpointEngineConfig, *, is_master: bool) -> dict[str, Any]:
        """The arguments of verl that the class accepts, and `engine_kwargs`. Raises ConfigError if they do not fit."""
        offered = {"bucket_size": config.bucket_nbytes, "is_master": is_master}
        options = dict(config.engine_kwargs.get(cls.name, {}))
        signature = inspect.signature(cls.engine_class)
        takes_any = any(value.kind is value.VAR_KEYWORD for value in signature.parameters.values())
        arguments = {key: value for key, value in offered.items() if takes_any or key in signature.parameters} | options
        try:
            signature.bind(**arguments)
        except TypeError as exc:
            raise ConfigError(
                f"checkpoint_engine.engine_kwargs.{cls.name}: {cls.engine_class.__name__}{signature} cannot take "
                f"({', '.join(arguments)}): {exc}"
            ) from exc
        return arguments

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        """A direct topology. The address of each member has its arguments of `init_process_group`."""
        members = [*trainers, *nodes]
        addresses = [parsed(member.address, Address, "the address of a member") for member in members]
        metadata = [_unpickled(address.metadata) for address in addresses]
        what = f"{cls.engine_class.__name__}.build_topology"
        try:
            of_ranks, of_nodes = cls.engine_class.build_topology(len(trainers), len(nodes), metadata)
            arguments = [*_dealt(of_ranks, len(trainers)), *_dealt(of_nodes, len(nodes))]
        except Exception as exc:
            raise TransportError(f"{what}: {type(exc).__name__}: {exc}", phase="prepare") from exc
        told = [
            replace(member, address=_encoded(Address(_pickled(own), address.owner)))
            for member, address, own in zip(members, addresses, arguments, strict=True)
        ]
        return direct(told[: len(trainers)], told[len(trainers) :])

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        self.finalize()
        self._plan = plan
        is_trainer = self.member.role == "trainer"
        arguments = self.arguments_of(self.config, is_master=is_trainer and self.member.index == 0)
        self._engine = self._calling("its constructor", lambda: self.engine_class(**arguments))
        metadata = self._calling("prepare", self._engine.prepare)
        if not is_trainer:
            return _encoded(Address(_pickled(metadata)))
        self._region = PackedRegion(plan, self.member.index)
        served = TcpWire(own_address(None), CONNECTIONS)
        self._wires = [served]
        served.register(self._region.bytes.numpy())
        owner = OwnerAddress(served.address(), 0, self._region.address, 0)
        return _encoded(Address(_pickled(metadata), owner))

    def init_process_group(self, topology: Topology) -> None:
        addresses = {
            member.name: parsed(member.address, Address, "the address of a member") for member in topology.members
        }
        arguments = _unpickled(addresses[self.member.name].metadata)
        timeout_s = self.config.deadlines.prepare_s * OWN_SHARE
        if self._wires:
            self._wires[0].admit(Admission(addresses=topology.host_addresses))
            self._wires.append(TcpWire(own_address(None), CONNECTIONS, listens=False))
            for rank in topology.trainers:
                owner = addresses[rank.name].owner
                assert owner is not None  # every rank has one
                self._wires[1].connect(rank.index, owner.wire, timeout_s)
                self._owners[rank.index] = owner
        self._calling("init_process_group", lambda: self._engine.init_process_group(**arguments), timeout_s=timeout_s)

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._region is not None  # the manager prepares every member before it publishes
        return publish(source, self._region)

    def serve_weights(self, version: int) -> int:
        weights = Weights(self._tensors(version))
        self._driven("send_weights", version, lambda: _awaited(self._engine.send_weights(weights)))
        return 0

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        assert self._plan is not None
        slot = arena.writable_view().bytes
        missing = {spec.name: (spec, offset) for spec, offset in self._plan.layout}

        async def receive() -> None:
            async for name, tensor in _both_ways(await _awaited_iterator(self._engine.receive_weights())):
                if name not in missing:
                    raise TransportError(f"it sent {name!r}, which is no tensor of the model, or was sent before")
                spec, offset = missing.pop(name)
                _check(spec, tensor)
                slot[offset : offset + spec.nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))

        self._driven("receive_weights", version, receive)
        if missing:
            names = ", ".join(sorted(missing)[:8])
            raise TransportError(
                f"{self.engine_class.__name__}.receive_weights ended without {len(missing)} tensors: {names}",
                version=version,
                phase="stage",
                member=self.member.name,
            )
        return self._plan.layout.payload_nbytes

    def finalize(self) -> None:
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                self._calling("finalize", engine.finalize)
        finally:
            for wire in self._wires:
                wire.close()
            self._wires = []
            self._owners.clear()
            self._plan, self._region = None, None

    def _tensors(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model, whole, in the order of the layout; memory of its own, some tensors at a time."""
        assert self._plan is not None
        for low, high, specs in _windows(self._plan, self.config.bucket_nbytes):
            memory = self._read(version, Range(low, low, high - low))
            for spec, offset in specs:
                part = memory[offset - low : offset - low + spec.nbytes]
                yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)

    def _read(self, version: int, window: Range) -> torch.Tensor:
        """A part of the slot, whole, from the regions of all ranks."""
        plan = self._plan
        assert plan is not None
        memory = torch.zeros(max(window.nbytes, 1), dtype=torch.uint8)
        buckets = [
            moved_to(bucket, -window.dst_offset)
            for owner in self._owners
            for bucket in messages_of(plan, owner, READ_NBYTES, window)
        ]
        bounce = np.zeros(max(bounce_nbytes(buckets), 1), np.uint8)
        reader = WireReader(self._wires[1], self._owners, memory.numpy(), bounce, version)
        FetchLoop(
            reader=reader,
            plan=plan,
            region=memory.numpy(),
            bounce=bounce,
            version=version,
            timeout_s=self.config.deadlines.stage_s * OWN_SHARE,
            stop=self._stop,
            origin=window.dst_offset,
        ).run(buckets)
        return memory

    # --- calls of the engine ------------------------------------------------------------------------------------------

    def _calling(self, method: str, call: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """`call()`, within `timeout_s` if that is given: then on a thread of its own, for it may never return."""
        attempt = Attempt(call) if timeout_s is not None else None
        if attempt is not None and not attempt.done.wait(timeout_s):
            raise TransportTimeout(
                f"{self.engine_class.__name__}.{method} has not returned within {timeout_s} s",
                phase="prepare",
                member=self.member.name,
            )
        try:
            returned: T = attempt.result() if attempt is not None else call()
        except Exception as exc:
            raise self._failed(method, exc, None, "prepare") from exc
        return returned

    def _driven(self, method: str, version: int, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` on an event loop of its own, until it ends, is interrupted, or its time is over."""
        deadline = time.monotonic() + self.config.deadlines.stage_s * OWN_SHARE

        async def drive() -> None:
            task = asyncio.ensure_future(work())
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if not task.done() and (self._stop.is_set() or time.monotonic() > deadline):
                    task.cancel()
                    await asyncio.wait({task}, timeout=LOOK_S)
                    given_up = "given up by the manager" if self._stop.is_set() else "it has not ended in time"
                    raise TransportTimeout(f"{self.engine_class.__name__}.{method}: {given_up}")
            await task

        try:
            asyncio.run(drive())
        except Exception as exc:
            raise self._failed(method, exc, version, "stage") from exc

    def _failed(self, method: str, error: Exception, version: int | None, phase: str) -> CheckpointEngineError:
        if isinstance(error, CheckpointEngineError):
            error.version, error.phase = error.version or version, error.phase or phase
            error.member = error.member or self.member.name
            return error
        message = f"{self.engine_class.__name__}.{method}: {type(error).__name__}: {error}"
        return TransportError(message, version=version, phase=phase, member=self.member.name)


class Weights:
    """(name, tensor) pairs, for engines that use `for` and those that use `async for`."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for named in self._tensors:
            yield named


def _windows(plan: SyncPlan, nbytes: int) -> Iterator[tuple[int, int, list[tuple[TensorSpec, int]]]]:
    """Runs of the slot of about `nbytes`, or of one tensor, with the tensors in them."""
    specs: list[tuple[TensorSpec, int]] = []
    for spec, offset in plan.layout:
        if specs and offset + spec.nbytes - specs[0][1] > nbytes:
            yield specs[0][1], specs[-1][1] + specs[-1][0].nbytes, specs
            specs = []
        specs.append((spec, offset))
    if specs:
        yield specs[0][1], specs[-1][1] + specs[-1][0].nbytes, specs


def _check(spec: TensorSpec, tensor: torch.Tensor) -> None:
    found, expected = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), (spec.dtype, tuple(spec.shape))
    if found != expected:
        raise TransportError(f"it sent {spec.name!r} as {found[0]}{list(found[1])}, not {spec.dtype}{list(spec.shape)}")


def _dealt(arguments: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """Each member's own arguments. Raises ValueError if there are not as many values as members."""
    for key, values in arguments.items():
        if len(values) != count:
            raise ValueError(f"{key} has {len(values)} values for {count} members")
    return [{key: values[place] for key, values in arguments.items()} for place in range(count)]


async def _awaited(result: Any) -> None:
    if inspect.isawaitable(result):
        await result


async def _awaited_iterator(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _both_ways(items: Any) -> AsyncIterator[Any]:
    if hasattr(items, "__aiter__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _pickled(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpickled(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - from a member of this job, over its control channel


def _encoded(address: Address) -> str:
    return msgspec.json.encode(address).decode()
