"""Training engines by the name that `actor_rollout_ref.actor.strategy` gives them. Built-ins are strings until used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from verl.utils.config import ConfigError, choose_from

if TYPE_CHECKING:
    from verl.workers.engine.base import TrainEngineFactory

Factory = TypeVar("Factory", bound="TrainEngineFactory")

BUILTIN = {
    "fsdp": "verl.workers.engine.fsdp.fsdp1:FSDP1Engine",
    "fsdp2": "verl.workers.engine.fsdp.fsdp2:FSDP2Engine",
}
""""module:Class"."""


class TrainEngineRegistry:
    """`actor_rollout_ref.actor.strategy` -> what makes the engine of a rank."""

    _registered: dict[str, TrainEngineFactory] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[Factory], Factory]:
        """Decorator that makes `strategy=<name>` mean this class. A name can be taken once."""

        def add(factory: Factory) -> Factory:
            if name in BUILTIN or cls._registered.get(name, factory) is not factory:
                raise ConfigError(f"a training engine is already registered as {name!r}")
            cls._registered[name] = factory
            return factory

        return add

    @classmethod
    def names(cls) -> list[str]:
        return sorted({*BUILTIN, *cls._registered})

    @classmethod
    def require(cls, name: str) -> None:
        """Raises ConfigError for a name that means nothing. Imports nothing: the driver needs no engine."""
        if name not in cls.names():
            raise ConfigError(
                f"unknown training engine actor_rollout_ref.actor.strategy={name!r}.{choose_from(name, cls.names())}"
            )

    @classmethod
    def get(cls, name: str) -> TrainEngineFactory:
        """Raises ConfigError for an unknown name."""
        cls.require(name)
        if name in cls._registered:
            return cls._registered[name]
        module, _, class_name = BUILTIN[name].partition(":")
        factory: TrainEngineFactory = getattr(importlib.import_module(module), class_name)
        return factory
