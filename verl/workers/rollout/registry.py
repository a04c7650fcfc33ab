"""Rollout engines by name. Built-ins are strings until somebody asks for them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.utils.config import ConfigError, choose_from

if TYPE_CHECKING:
    from verl.workers.rollout.base import RolloutReplica

ReplicaClass = TypeVar("ReplicaClass", bound="type[RolloutReplica]")


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """A replica class that comes with the project."""

    target: str
    """"module:Class"."""
    package: str
    """What must be importable for it."""
    remedy: str


BUILTIN = {
    "vllm": Builtin(
        target="verl.workers.rollout.vllm.replica:VLLMReplica",
        package="vllm",
        remedy="pip install 'verl-sync[cuda]' on a CUDA machine, or `make install` on a CPU machine",
    ),
    "hf": Builtin(
        target="verl.workers.rollout.hf.replica:HFReplica",
        package="transformers",
        remedy="pip install verl-sync",
    ),
}


class RolloutReplicaRegistry:
    """`rollout.name` -> replica class."""

    _registered: dict[str, type[RolloutReplica]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[ReplicaClass], ReplicaClass]:
        """Class decorator that makes `rollout.name=<name>` mean this class. A name can be taken once."""

        def add(replica_class: ReplicaClass) -> ReplicaClass:
            if name in BUILTIN or cls._registered.get(name, replica_class) is not replica_class:
                raise ConfigError(f"a rollout engine is already registered as {name!r}")
            cls._registered[name] = replica_class
            return replica_class

        return add

    @classmethod
    def names(cls) -> list[str]:
        return sorted({*BUILTIN, *cls._registered})

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        """Raises ConfigError for an unknown name, BackendUnavailable if the engine's package is not installed."""
        if name in cls._registered:
            return cls._registered[name]
        if name not in BUILTIN:
            raise ConfigError(f"unknown rollout engine rollout.name={name!r}.{choose_from(name, cls.names())}")
        builtin = BUILTIN[name]
        if importlib.util.find_spec(builtin.package) is None:
            raise BackendUnavailable(
                f"rollout.name={name} needs the package {builtin.package!r}, which is not installed: {builtin.remedy}"
            )
        module, _, class_name = builtin.target.partition(":")
        replica_class: type[RolloutReplica] = getattr(importlib.import_module(module), class_name)
        return replica_class
