"""Backends by name. Built-in ones are "module:Class" strings that are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .checkpoint_engine import CheckpointEngine
from .config import (
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
from .errors import BackendUnavailable, ConfigError
from .support import config as strict
from .support.package import PACKAGE, extra
from .support.registry import Builtin, Registry, require_subclass


@dataclass(frozen=True, kw_only=True)
class Backend(Builtin):
    """A built-in backend. `remedy` names the pip extra, its packages, and system libraries to install."""

    options: type[Any] | None = None
    """Dataclass of `checkpoint_engine.engine_kwargs.<name>`."""


MOONCAKE_LIBRARIES = (
    ", and the system libraries libibverbs, libnuma and libcurl (apt-get install libibverbs1 libnuma1 libcurl4)"
)
_BACKENDS = f"{PACKAGE}.backends"
BUILTIN = {
    "naive": Backend(target=f"{_BACKENDS}.naive:NaiveEngine", options=NaiveOptions),
    "gloo": Backend(target=f"{_BACKENDS}.collective:GlooEngine", options=GlooOptions),
    "nccl": Backend(target=f"{_BACKENDS}.collective:NcclEngine", options=NcclOptions, remedy=extra("cuda")),
    "hccl": Backend(target=f"{_BACKENDS}.collective:HcclEngine", options=HcclOptions, remedy=extra("npu")),
    "tcp": Backend(target=f"{_BACKENDS}.tcp:TcpEngine", options=TcpOptions),
    "nixl": Backend(target=f"{_BACKENDS}.nixl:NixlEngine", options=NixlOptions, remedy=extra("nixl")),
    "mooncake": Backend(
        target=f"{_BACKENDS}.mooncake:MooncakeEngine",
        options=MooncakeOptions,
        remedy=extra("mooncake") + MOONCAKE_LIBRARIES,
    ),
    "kimi_ckpt_engine": Backend(
        target=f"{_BACKENDS}.kimi_ckpt_engine:KimiCkptEngine",
        options=KimiCkptEngineOptions,
        remedy=extra("kimi") + MOONCAKE_LIBRARIES,
    ),
}
CheckpointEngineRegistry: Registry[type[CheckpointEngine]] = Registry(
    "checkpoint_engine.backend",
    builtin=BUILTIN,
    missing=BackendUnavailable,
    hint=" A backend of yours is registered by the module in checkpoint_engine.custom_backend_module",
)
"""`register` adds a user's backend, `get` finds a class, `new` makes an instance."""


COLLECTIVES = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
"""The backend of `checkpoint_engine.backend=auto` on each device."""


def backend_of_device(device: str) -> str:
    """The collective backend of `device`. Raises ConfigError listing the known devices."""
    if device not in COLLECTIVES:
        raise ConfigError(
            f"checkpoint_engine.backend=auto does not know the device {device!r}; known: {', '.join(COLLECTIVES)}"
        )
    return COLLECTIVES[device]


def _hosted_if_for_verl(config: CheckpointEngineConfig, engine_class: type[CheckpointEngine]) -> type[CheckpointEngine]:
    """What runs a backend that has verl's methods, its options checked; or `engine_class`."""
    verl_engine = importlib.import_module(f"{_BACKENDS}.verl_engine")
    if not verl_engine.is_for_verl(engine_class):
        return engine_class
    found: type[CheckpointEngine] = verl_engine.hosted(config.backend, engine_class)
    found.check_host(config)
    return found


def _derived(base: type[Any]) -> Iterator[type[Any]]:
    """Classes outside of this package that are derived from `base`, and from which no class is."""
    for derived in base.__subclasses__():
        yield from _derived(derived)
        if not derived.__subclasses__() and not derived.__module__.startswith(f"{PACKAGE}."):
            yield derived


def _require_complete(name: str, engine_class: type[CheckpointEngine]) -> None:
    """Raises ConfigError, naming what a backend of a user's, or a wire of theirs, lacks."""
    what = f"checkpoint_engine.backend={name}"
    base = importlib.import_module(f"{__package__}.checkpoint_engine").CheckpointEngine
    wire_class = importlib.import_module(f"{__package__}.links.wire").Wire
    try:
        require_subclass(engine_class, base, what, ("capabilities",))
        for wire in _derived(wire_class):
            require_subclass(wire, wire_class, what)
    except strict.ConfigError as exc:
        raise ConfigError(str(exc)) from exc


def resolve_backend(config: CheckpointEngineConfig) -> type[CheckpointEngine]:
    """The backend class that `config` selects; checks its options. Called on the driver, and again on every member.

    Raises ConfigError or BackendUnavailable.
    """
    if config.custom_backend_module:
        try:
            importlib.import_module(config.custom_backend_module)
        except Exception as exc:
            reason = exc if isinstance(exc, ModuleNotFoundError) else f"{type(exc).__name__}: {exc}"
            raise ConfigError(
                f"checkpoint_engine.custom_backend_module={config.custom_backend_module!r} cannot be imported: {reason}"
            ) from exc
    try:
        engine_class = CheckpointEngineRegistry.get(config.backend)
    except strict.ConfigError as exc:
        raise ConfigError(str(exc)) from exc
    if config.backend in CheckpointEngineRegistry.functions:
        engine_class = _hosted_if_for_verl(config, engine_class)
        _require_complete(config.backend, engine_class)
    topologies = engine_class.capabilities.topologies
    if config.topology not in ("auto", *topologies):
        raise ConfigError(
            f"checkpoint_engine.topology={config.topology} is impossible with "
            f"checkpoint_engine.backend={config.backend}; possible: {', '.join(('auto', *topologies))}"
        )
    if config.delta == "always" and not engine_class.capabilities.deltas:
        raise ConfigError(
            f"checkpoint_engine.delta=always is impossible with checkpoint_engine.backend={config.backend}; "
            "tcp, gloo, nixl, mooncake, kimi_ckpt_engine, nccl and hccl can"
        )
    if config.delta == "always" and not config.verify:
        raise ConfigError("checkpoint_engine.delta=always needs checkpoint_engine.verify=true: deltas are verified")
    for name, options in config.engine_kwargs.items():
        if name not in CheckpointEngineRegistry.names():
            raise ConfigError(
                f"checkpoint_engine.engine_kwargs.{name}: no such backend."
                + strict.did_you_mean(name, CheckpointEngineRegistry.names())
            )
        registered = CheckpointEngineRegistry.functions.get(name)
        options_class = registered.options_class if registered is not None else BUILTIN[name].options
        if options_class is not None:
            try:
                strict.from_mapping(options_class, options, f"checkpoint_engine.engine_kwargs.{name}")
            except strict.ConfigError as exc:
                raise ConfigError(str(exc)) from exc
    return engine_class
