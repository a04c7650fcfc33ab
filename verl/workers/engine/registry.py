"""Training engines by the name that `actor_rollout_ref.actor.strategy` gives them. Built-ins are strings until used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from verl.utils.config import ConfigError, choose_from

if TYPE_CHECKING:
    from verl.workers.config import FSDPConfig, HFModelConfig, MegatronConfig
    from verl.workers.engine.base import TrainEngine, TrainEngineFactory

Factory = TypeVar("Factory", bound="TrainEngineFactory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """Strings are "module:name"."""

    factory: str
    is_megatron: bool = False
    """Made from the section `megatron`; all others, also those that are registered, from `fsdp_config`."""
    check: str | None = None
    """Called on the driver with that section, the model, the number of ranks, their device, and the number of labels.

    Raises ConfigError."""


BUILTIN = {
    "fsdp": Builtin(factory="verl.workers.engine.fsdp.fsdp1:FSDP1Engine"),
    "fsdp2": Builtin(factory="verl.workers.engine.fsdp.fsdp2:FSDP2Engine"),
    "megatron": Builtin(
        factory="verl.workers.engine.megatron.engine:MegatronEngine",
        is_megatron=True,
        check="verl.workers.engine.megatron.checks:check_job",
    ),
}


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
        factory: TrainEngineFactory = _imported(BUILTIN[name].factory)
        return factory

    @classmethod
    def new(cls, name: str, *, fsdp: FSDPConfig, megatron: MegatronConfig, **options: Any) -> TrainEngine:
        """An engine of that name from its own one of the two sections, and `options` for its factory."""
        make: Any = cls.get(name)
        is_megatron = name in BUILTIN and BUILTIN[name].is_megatron
        engine: TrainEngine = make(
            **({"megatron_config": megatron} if is_megatron else {"fsdp_config": fsdp}), **options
        )
        return engine

    @classmethod
    def check_job(
        cls, name: str, *, megatron: MegatronConfig, model: HFModelConfig, world_size: int, device: str, labels: int = 0
    ) -> None:
        """Whether such engines can hold the model in the local directory `model.path`, before any is made.

        `labels`: how many numbers for every token a critic has; 0 for a policy.

        Raises ConfigError for what can be known to fail on this machine.
        """
        if name in BUILTIN and (check := BUILTIN[name].check):
            _imported(check)(megatron, model, world_size, device, labels)


def _imported(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
