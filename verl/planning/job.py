"""A planned job: its trainers, rollouts and links, parsed from a command line. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from verl.utils.config import ConfigError

STRATEGIES = ("fsdp2", "megatron")
GIGA = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """`64x8`: 64 hosts with 8 ranks, or devices, each."""

    count: int
    each: int

    @property
    def ranks(self) -> int:
        return self.count * self.each


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network between the hosts."""

    host_bytes_per_s: float
    """The rate of one host in each direction."""
    hosts_per_leaf: int | None = None
    """Hosts below one switch; None if all are below one."""
    oversubscription: float = 1.0
    """The total rate of the hosts below a switch, over the rate of its link to the other switches."""


@dataclass(frozen=True, kw_only=True)
class Job:
    trainers: Hosts
    strategy: str
    rollouts: Hosts
    rollout_tp: int
    fabric: Fabric
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    fsdp_size: int = -1
    colocated: bool = False
    """Whether rollout engines are on the trainers' hosts."""
    dtype: str = "bfloat16"
    slots: int = 2
    block_nbytes: int = 2**20
    changed: float | None = None
    """The fraction of values that change between two versions; None without deltas."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.colocated and self.trainers.count != self.rollouts.count:
            raise ConfigError(
                f"--colocated needs as many hosts of rollouts as of trainers, not {self.rollouts.count} and "
                f"{self.trainers.count}"
            )
        if self.strategy == "fsdp2" and (self.tensor, self.pipeline, self.expert) != (1, 1, 1):
            raise ConfigError("--tp, --pp and --ep are for --strategy megatron; fsdp2 cuts rows: --fsdp-size")
        if self.strategy == "megatron" and self.fsdp_size != -1:
            raise ConfigError("--fsdp-size is for --strategy fsdp2")
        if self.fsdp_size != -1 and (self.fsdp_size < 1 or self.trainers.ranks % self.fsdp_size):
            raise ConfigError(f"--fsdp-size {self.fsdp_size} does not divide {self.trainers.ranks} trainer ranks")
        if self.rollouts.ranks % self.rollout_tp:
            raise ConfigError(
                f"--rollout-tp {self.rollout_tp} does not divide the {self.rollouts.ranks} devices of the rollouts"
            )

    @property
    def replicas(self) -> int:
        return self.rollouts.ranks // self.rollout_tp

    def trainer_host(self, rank: int) -> int:
        return rank // self.trainers.each

    def node_host(self, node: int) -> int:
        """The host of a rollout node. Hosts are numbered, first those of trainers, then those of rollouts."""
        return node if self.colocated else self.trainers.count + node

    @property
    def hosts(self) -> int:
        return self.trainers.count + (0 if self.colocated else self.rollouts.count)


def hosts_of(text: str) -> Hosts:
    """`64x8`, or `8` for one host. Raises ValueError."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)", text.strip())
    if not found or not int(found[1] or 1) or not int(found[2]):
        raise ValueError(f"{text!r} is not HOSTSxRANKS, such as 64x8")
    return Hosts(count=int(found[1] or 1), each=int(found[2]))


def bytes_per_s(text: str) -> float:
    """`400gbit` or `50GB`, per second; `8x400gbit` for several devices of a host. Raises ValueError."""
    pattern = r"(?:(\d+)x)?(\d+(?:\.\d+)?)\s*([kmgt])(bit|b)(?:ps|/s|it/s)?"
    found = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    rate = int(found[1] or 1) * float(found[2]) * GIGA[found[3].lower()] if found else 0.0
    if not found or not rate:
        raise ValueError(f"{text!r} is not a rate, such as 400gbit, 8x400gbit or 50GB")
    return rate / (8 if found[4].lower() == "bit" else 1)


def fraction_of(text: str) -> float:
    """`1%` or `0.01`. Raises ValueError."""
    plain = text.strip()
    value = float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    if not 0 < value <= 1:
        raise ValueError(f"{text!r} is not a part of all values, such as 1% or 0.01")
    return value
