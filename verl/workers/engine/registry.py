"""Training engines by the name that `actor_rollout_ref.actor.strategy` gives them. Built-ins are strings until used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.support.registry import Builtin, Registry, imported

if TYPE_CHECKING:
    from verl.workers.config import FSDPConfig, HFModelConfig, MegatronConfig
    from verl.workers.engine.base import TrainEngine, TrainEngineFactory


@dataclass(frozen=True, kw_only=True)
class BuiltinEngine(Builtin):
    is_megatron: bool = False
    """Made from the section `megatron`; all others, also those that are registered, from `fsdp_config`."""
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
"""`actor_rollout_ref.actor.strategy` -> what makes the engine of a rank. `register` adds one of the user's own."""


def new_engine(name: str, *, fsdp: FSDPConfig, megatron: MegatronConfig, **options: Any) -> TrainEngine:
    """An engine of that name from its own one of the two sections, and `options` for its factory."""
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
    """Whether such engines can hold the model in the local directory `model.path`, before any is made.

    `labels`: how many numbers for every token a critic has; 0 for a policy.

    Raises ConfigError for what can be known to fail on this machine.
    """
    if name in BUILTIN and (check := BUILTIN[name].check):
        section = megatron if BUILTIN[name].is_megatron else fsdp
        imported(check)(section, model, world_size, device, labels)
