"""Backends by name. Built-in ones are "module:Class" strings until somebody asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.checkpoint_engine.base import CheckpointEngine
from verl.checkpoint_engine.config import (
    CheckpointEngineConfig,
    GlooOptions,
    HcclOptions,
    KimiCkptEngineOptions,
    MooncakeOptions,
    NaiveOptions,
    NcclOptions,
    NixlOptions,
    TcpOptions,
)
from verl.checkpoint_engine.errors import BackendUnavailable, ConfigError
from verl.utils import config as strict

EngineClass = TypeVar("EngineClass", bound=type[CheckpointEngine])


@dataclass(frozen=True)
class Backend:
    """Where a backend is, the pip extra that brings what it needs, and the dataclass of its options."""

    target: str
    extra: str | None = None
    options: type[Any] | None = None
    system: str | None = None
    """What else must be installed, outside of Python."""

    def load(self, name: str) -> type[CheckpointEngine]:
        """Import the class. Raises BackendUnavailable that names what is missing and the extra that brings it."""
        module, _, attribute = self.target.partition(":")
        try:
            engine_class: type[CheckpointEngine] = getattr(importlib.import_module(module), attribute)
        except ImportError as exc:
            missing = (
                f"needs the package {exc.name!r}" if isinstance(exc, ModuleNotFoundError) else f"cannot load: {exc}"
            )
            raise BackendUnavailable(
                f"checkpoint_engine.backend={name} {missing}: pip install 'verl-sync[{self.extra or name}]'"
                + (f", and {self.system}" if self.system else "")
            ) from exc
        return engine_class


MOONCAKE_LIBRARIES = (
    "the system libraries libibverbs, libnuma and libcurl (apt-get install libibverbs1 libnuma1 libcurl4)"
)
BUILTIN = {
    "naive": Backend("verl.checkpoint_engine.backends.naive:NaiveEngine", options=NaiveOptions),
    "gloo": Backend("verl.checkpoint_engine.backends.collective:GlooEngine", options=GlooOptions),
    "nccl": Backend("verl.checkpoint_engine.backends.collective:NcclEngine", extra="cuda", options=NcclOptions),
    "hccl": Backend("verl.checkpoint_engine.backends.collective:HcclEngine", extra="npu", options=HcclOptions),
    "tcp": Backend("verl.checkpoint_engine.backends.tcp:TcpEngine", options=TcpOptions),
    "nixl": Backend("verl.checkpoint_engine.backends.nixl:NixlEngine", extra="nixl", options=NixlOptions),
    "mooncake": Backend(
        "verl.checkpoint_engine.backends.mooncake:MooncakeEngine",
        extra="mooncake",
        options=MooncakeOptions,
        system=MOONCAKE_LIBRARIES,
    ),
    "kimi_ckpt_engine": Backend(
        "verl.checkpoint_engine.backends.kimi_ckpt_engine:KimiCkptEngine",
        extra="kimi",
        options=KimiCkptEngineOptions,
        system=MOONCAKE_LIBRARIES,
    ),
}


COLLECTIVES = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
"""What `checkpoint_engine.backend=auto` means on each device."""


def backend_of_device(device: str) -> str:
    """Raises ConfigError that lists the known devices."""
    if device not in COLLECTIVES:
        raise ConfigError(
            f"checkpoint_engine.backend=auto does not know the device {device!r}; known: {', '.join(COLLECTIVES)}"
        )
    return COLLECTIVES[device]


class CheckpointEngineRegistry:
    """`register` adds a backend of one's own, `get` finds a class, `new` makes an instance."""

    _registered: dict[str, type[CheckpointEngine]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[EngineClass], EngineClass]:
        """Class decorator. Raises ValueError if another class has the name."""

        def add(engine_class: EngineClass) -> EngineClass:
            known = cls._registered.get(name)
            if name in BUILTIN or (known is not None and known.__qualname__ != engine_class.__qualname__):
                raise ValueError(f"a checkpoint engine named {name!r} is already registered")
            cls._registered[name] = engine_class
            return engine_class

        return add

    @classmethod
    def names(cls) -> list[str]:
        return sorted({*BUILTIN, *cls._registered})

    @classmethod
    def get(cls, name: str) -> type[CheckpointEngine]:
        """Raises ConfigError for an unknown name, BackendUnavailable (naming the extra) for a missing package."""
        if name in cls._registered:
            return cls._registered[name]
        if name not in BUILTIN:
            hint = strict.choose_from(name, cls.names())
            raise ConfigError(
                f"unknown checkpoint_engine.backend {name!r}.{hint} "
                "A backend of yours is registered by the module in checkpoint_engine.custom_backend_module"
            )
        return BUILTIN[name].load(name)

    @classmethod
    def new(cls, name: str, **arguments: Any) -> CheckpointEngine:
        return cls.get(name)(**arguments)


def _hosted_if_for_verl(config: CheckpointEngineConfig, engine_class: type[CheckpointEngine]) -> type[CheckpointEngine]:
    """What runs a backend that has verl's methods, its options checked; or `engine_class`."""
    verl_engine = importlib.import_module("verl.checkpoint_engine.backends.verl_engine")
    if not verl_engine.is_for_verl(engine_class):
        return engine_class
    found: type[CheckpointEngine] = verl_engine.hosted(config.backend, engine_class)
    found.check_host(config)
    return found


def resolve_backend(config: CheckpointEngineConfig) -> type[CheckpointEngine]:
    """The class that `config` asks for, its options checked. Called on the driver, and again on every member.

    Raises ConfigError or BackendUnavailable.
    """
    if config.custom_backend_module:
        try:
            importlib.import_module(config.custom_backend_module)
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"checkpoint_engine.custom_backend_module={config.custom_backend_module!r} cannot be imported: {exc}"
            ) from exc
    engine_class = CheckpointEngineRegistry.get(config.backend)
    if config.backend in CheckpointEngineRegistry._registered:
        engine_class = _hosted_if_for_verl(config, engine_class)
    topologies = engine_class.capabilities.topologies
    if config.topology not in ("auto", *topologies):
        raise ConfigError(
            f"checkpoint_engine.topology={config.topology} is impossible with "
            f"checkpoint_engine.backend={config.backend}; possible: {', '.join(('auto', *topologies))}"
        )
    for name, options in config.engine_kwargs.items():
        if name not in CheckpointEngineRegistry.names():
            raise ConfigError(
                f"checkpoint_engine.engine_kwargs.{name}: no such backend."
                + strict.did_you_mean(name, CheckpointEngineRegistry.names())
            )
        registered = CheckpointEngineRegistry._registered.get(name)
        options_class = registered.options_class if registered is not None else BUILTIN[name].options
        if options_class is not None:
            try:
                strict.from_mapping(options_class, options, f"checkpoint_engine.engine_kwargs.{name}")
            except strict.ConfigError as exc:
                raise ConfigError(str(exc)) from exc
    return engine_class
