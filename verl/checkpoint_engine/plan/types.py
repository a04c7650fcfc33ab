"""The records that trainer ranks, rollout nodes and the manager exchange. No torch, so any process can decode them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from ..support.memory import MemoryUse, most
from .delta_choice import DeltaReport
from .member_report import Link, PhaseReport

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype that a checkpoint may hold, under torch's name without the `torch.` prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the whole model in Hugging Face checkpoint naming, as the rollout engine will receive it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


TensorMeta = TensorSpec
"""verl's name for the same record."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: elements `start[d] <= index[d] < stop[d]` in every dimension d.

    A scalar has the box `Box((), ())`, which holds one element.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def contains(self, other: Box) -> bool:
        """Whether `other` lies entirely in this box."""
        return len(self.start) == len(other.start) and all(
            start <= inner_start and inner_stop <= stop
            for start, inner_start, inner_stop, stop in zip(self.start, other.start, other.stop, self.stop, strict=True)
        )

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the tensor `name` that one trainer rank holds."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Range:
    """`nbytes` at `src_offset` of one memory region belong at `dst_offset` of another."""

    src_offset: int
    dst_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a sync: a trainer rank or a rollout node. Its backend defines the content of `address`."""

    role: str
    """`trainer` or `node`."""
    index: int
    host: str
    address: str = ""
    arena: str = ""
    """The directory of a rollout node's arena; empty for a trainer rank."""
    host_addresses: tuple[str, ...] = ()
    """IPv4 addresses of its host, from which it makes connections."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheckResult:
    """An engine's successful check that it computes with the version that it loaded; `found` has its extent."""

    seconds: float
    """The check's share of the activation, on the slowest rank of the engine."""
    found: str
    """What was compared, or why not all was."""
    tensors_kept: int = 0
    """Tensors of the version that the engine had already and did not load: the fewest of its ranks."""


PHASES = ("prepare", "publish", "stage", "verify", "wait", "commit", "activate", "resume")
"""The phases of a sync in order. `prepare` takes no time unless shards, nodes or layout are new. `wait` lasts until
rollouts may get new weights; it takes no time if nothing generates during a sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The report of one sync. Seconds are wall clock at the manager; the phases add up to `total_s`."""

    version: int
    backend: str
    outcome: str
    """`committed`, or `aborted`: replicas serve the previous version."""
    nbytes_needed: int
    """Bytes of one version at the rollout dtype, times the number of rollout nodes."""
    nbytes_moved: int
    """Bytes copied into the packed regions of trainer ranks, if the backend has them, and into node arenas."""
    phase_s: dict[str, float]
    total_s: float
    began_s: float
    """Seconds since the epoch."""
    laps: tuple[tuple[str, float], ...]
    """(phase, seconds) in order and without gaps. Phases repeat after a failed attempt and with rolling activation."""
    trainer_blocked_s: float
    """The longest time that a trainer rank could not change its weights: the copy of its own shards, or, if training
    went on meanwhile, what was left of the copy when the trainer waited for it."""
    paused_s: dict[str, float]
    """Per replica: from the request to pause until it could generate again."""
    replicas_updated: tuple[str, ...]
    replicas_quarantined: tuple[str, ...]
    retries: int
    pieces_repaired: int = 0
    """Pieces, on all nodes together, that arrived wrong and were right after they had been fetched again."""
    error: str | None = None
    engine_checks: dict[str, EngineCheckResult] = field(default_factory=dict)
    """Per replica whose engine checked its weights: `checkpoint_engine.check_engine`."""
    delta: DeltaReport | None = None
    """Set if the sync had a `DeltaRequest`."""
    members: dict[str, PhaseReport] = field(default_factory=dict)
    """Per phase: the manager's waits for trainer ranks, rollout nodes and replicas."""
    links: tuple[Link, ...] = ()
    """The busiest links over which nodes fetched, if the backend reports links."""
    memory: tuple[MemoryUse, ...] = ()
    """The highest peaks of trainer ranks in publish and of nodes in stage."""
    failed_attempts: tuple[str, ...] = ()
    """Why each attempt before the last failed."""
    attempt: int = 0
    """How often the trainer ranks had been replaced. Replaced ranks may publish a version number again."""

    @property
    def gbytes_per_s(self) -> float:
        """`nbytes_needed` per second of publish, stage and verify, in 1e9 bytes."""
        moving_s = sum(self.phase_s.get(phase, 0.0) for phase in ("publish", "stage", "verify"))
        return self.nbytes_needed / moving_s / 1e9 if moving_s > 0 else 0.0

    def timed_laps(self) -> Iterator[tuple[str, float, float]]:
        """(phase, start, stop) of each lap, in seconds since the epoch."""
        start_s = self.began_s
        for phase, seconds in self.laps:
            yield phase, start_s, start_s + seconds
            start_s += seconds

    def metrics(self) -> dict[str, float]:
        """Scalars under `checkpoint_engine/`, and `memory/trainer/publish/` and `memory/node/stage/`."""
        scalars = {
            "version": self.version,
            "nbytes_needed": self.nbytes_needed,
            "nbytes_moved": self.nbytes_moved,
            "total_s": self.total_s,
            "trainer_blocked_s": self.trainer_blocked_s,
            "generation_paused_s": max(self.paused_s.values(), default=0.0),
            "gbytes_per_s": self.gbytes_per_s,
            "replicas_updated": len(self.replicas_updated),
            "replicas_quarantined": len(self.replicas_quarantined),
            "retries": self.retries,
            "pieces_repaired": self.pieces_repaired,
            "slowest_wait_s": sum(phase.excess_s for phase in self.members.values()),
            "check_engine_s": max((check.seconds for check in self.engine_checks.values()), default=0.0),
        }
        if self.delta is not None:
            scalars |= {
                "delta/is_delta": self.delta.way != "full",
                "delta/changed_fraction": self.delta.changed_fraction,
                "delta/bits_per_change": self.delta.bits_per_change,
                "delta/nbytes": self.delta.nbytes_delta,
                "delta/predicted_full_s": self.delta.predicted_full_s,
                "delta/predicted_delta_s": self.delta.predicted_delta_s,
                "delta/encode_s": self.delta.encode_s,
                "delta/fetch_s": self.delta.fetch_s,
                "delta/apply_s": self.delta.apply_s,
                "delta/tensors_unchanged": self.delta.tensors_unchanged,
            }
        scalars |= {f"{phase}_s": seconds for phase, seconds in self.phase_s.items()}
        named = {f"checkpoint_engine/{key}": float(value) for key, value in scalars.items()}
        for role in ("trainer", "node"):
            if (use := most(use for use in self.memory if use.process.startswith(role))) is not None:
                named |= use.metrics(role)
        return named
