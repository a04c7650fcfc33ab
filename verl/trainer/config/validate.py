"""Checks whether the sections fit together. Runs on the driver before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.trainer.config.checks import (
    algorithms,
    critic,
    determinism,
    devices,
    engines,
    names,
    profiler,
    rewards,
    sizes,
    teachers,
)
from verl.utils.config import ConfigError
from verl.utils.pictures import frame_limits, pixel_limits
from verl.workers.config import PPOConfig


def validate(config: PPOConfig) -> None:
    """Raises ConfigError with the lines of `problems_of`."""
    if problems := problems_of(config):
        raise ConfigError("\n".join(problems))


def problems_of(config: PPOConfig, lacking: list[str] | None = None) -> list[str]:
    """A line for every combination that cannot work, with the conflicting values.

    Imports the user's modules (`model.external_lib`, `checkpoint_engine.custom_backend_module`), since they may
    register names. Raises BackendUnavailable for a module whose package is missing, or with `lacking` appends it there.
    """
    problems: list[str] = []
    for check in CHECKS:
        try:
            problems.extend(check(config))
        except BackendUnavailable as exc:
            if lacking is None:
                raise
            lacking.append(str(exc))
    return problems


def _limits_of_pixels(config: PPOConfig) -> Iterator[str]:
    try:
        pixel_limits(config.data.mm_processor_kwargs)
        frame_limits(config.data.mm_processor_kwargs)
    except ConfigError as exc:
        yield str(exc)


def _min_ranks(config: PPOConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.min_ranks is None or any(next(check(config), None) for check in CHECKS if check is not _min_ranks):
        return
    key = f"trainer.min_ranks={trainer.min_ranks}"
    if trainer.min_ranks >= trainer.world_size:
        yield f"{key} is not less than {trainer.world_size} trainer ranks: leave it null"
    elif trainer.max_restarts == 0:
        yield f"{key} needs trainer.max_restarts of 1 or more"
    elif not possible_fewer_ranks(config):
        layouts = trainer.fewer_ranks
        problems = problems_of(with_ranks(config, *layouts[0])) if layouts else ["hosts have the same number of them"]
        yield f"{key} allows no fewer ranks: {'; '.join(problems)}"


def possible_fewer_ranks(config: PPOConfig) -> list[tuple[int, int]]:
    """The layouts of `TrainerConfig.fewer_ranks` with which the rest of `config` is valid."""
    return [layout for layout in config.trainer.fewer_ranks if not problems_of(with_ranks(config, *layout))]


def with_ranks(config: PPOConfig, nnodes: int, n_gpus_per_node: int) -> PPOConfig:
    """`config` with another number of hosts, and of ranks on each."""
    trainer = replace(config.trainer, nnodes=nnodes, n_gpus_per_node=n_gpus_per_node, min_ranks=None)
    return replace(config, trainer=trainer)


CHECKS: tuple[Callable[[PPOConfig], Iterator[str]], ...] = (
    sizes.batch_sizes,
    sizes.micro_batch_sizes,
    sizes.lengths,
    algorithms.algorithm_keys,
    algorithms.estimators,
    rewards.rewards,
    teachers.distillation,
    devices.placement,
    devices.counts,
    devices.experts,
    sizes.sharing,
    engines.reference,
    profiler.profiler,
    names.files,
    names.local_places,
    names.user_modules,
    names.registered_names,
    critic.critic_of,
    engines.lora,
    engines.exact,
    engines.kv_across_versions,
    engines.mismatch_probe,
    determinism.full_determinism,
    engines.checkpoint_engine,
    _limits_of_pixels,
    _min_ranks,
)
