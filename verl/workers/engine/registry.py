"""Training engines by the name that `actor_rollout_ref.actor.strategy` gives them. Built-ins are strings until used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.support.registry import Builtin, Registry, imported, require_methods

if TYPE_CHECKING:
    from verl.workers.config import FSDPConfig, HFModelConfig, MegatronConfig
    from verl.workers.engine.base import TrainEngine, TrainEngineFactory


@dataclass(frozen=True, kw_only=True)
class BuiltinEngine(Builtin):
    is_megatron: bool = False
    """Whether its section is `megatron`; that of all others, registered ones included, is `fsdp_config`."""
    check: str | None = None
    """Called on the driver with that section, the model, the number of ranks, their device, and the number of labels.

    Raises ConfigError."""


BUILTIN = {
    "fsdp": BuiltinEngine(
        target="verl.workers.engine.fsdp.fsdp1:FSDP1Engine", check="verl.workers.engine.fsdp.checks:check_job"
    ),
    "fsdp2": BuiltinEngine(
        target="verl.workers.engine.fsdp.fsdp2:FSDP2Engine", check="verl.workers.engine.fsdp.checks:check_job"
    ),
    "megatron": BuiltinEngine(
        target="verl.workers.engine.megatron.engine:MegatronEngine",
        is_megatron=True,
        check="verl.workers.engine.megatron.checks:check_job",
    ),
}
TrainEngineRegistry: Registry[TrainEngineFactory] = Registry("actor_rollout_ref.actor.strategy", builtin=BUILTIN)
"""`actor_rollout_ref.actor.strategy` -> factory of a rank's engine. `register` adds a user's engine."""


def new_engine(name: str, *, fsdp: FSDPConfig, megatron: MegatronConfig, **options: Any) -> TrainEngine:
    """Make the engine of that name from its section, with `options` for its factory."""
    is_megatron = name in BUILTIN and BUILTIN[name].is_megatron
    section = {"megatron_config": megatron} if is_megatron else {"fsdp_config": fsdp}
    engine: TrainEngine = TrainEngineRegistry.new(name, **section, **options)
    return engine


def check_engine(
    name: str,
    *,
    fsdp: FSDPConfig,
    megatron: MegatronConfig,
    model: HFModelConfig,
    world_size: int,
    device: str,
    labels: int = 0,
) -> None:
    """Check, before any engine exists, that these engines can hold the model in the local directory `model.path`.

    `labels`: the numbers per token of a critic; 0 for a policy.

    Raises ConfigError for problems that this machine can detect, such as a registered class that lacks a method of
    `TrainEngine` or an argument.
    """
    if name not in BUILTIN and isinstance(factory := TrainEngineRegistry.get(name), type):
        from verl.workers.engine.base import TrainEngine, ValueEngine

        for protocol in (TrainEngine, ValueEngine) if labels else (TrainEngine,):
            require_methods(factory, protocol, f"actor_rollout_ref.actor.strategy={name}")
    if name in BUILTIN and (check := BUILTIN[name].check):
        section = megatron if BUILTIN[name].is_megatron else fsdp
        imported(check)(section, model, world_size, device, labels)
