"""Checks whether files exist, and whether looked-up names are registered."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

from verl.utils.config import ConfigError, did_you_mean
from verl.utils.user_code import is_module, not_a_file
from verl.workers.config import PPOConfig


def files(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    for key, path in (
        ("custom_reward_function.path", config.custom_reward_function.path),
        ("data.custom_cls.path", config.data.custom_cls.path),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", rollout.multi_turn.tool_config_path),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path", rollout.agent.agent_loop_config_path),
    ):
        if path is not None and not is_module(path) and (missing := not_a_file(path, key)):
            yield missing


def local_places(config: PPOConfig) -> Iterator[str]:
    """Where a run writes: `s3://bucket` would be a folder `s3:` here."""
    trainer = config.trainer
    for key, path in (
        ("trainer.default_local_dir", trainer.default_local_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
        ("checkpoint_engine.report_path", config.checkpoint_engine.report_path),
    ):
        if path is not None and "://" in path:
            yield f"{key}={path} is not a path of this machine: mount that storage, and name the directory"


def user_modules(config: PPOConfig) -> Iterator[str]:
    module = config.actor_rollout_ref.model.external_lib
    if module is not None:
        try:
            importlib.import_module(module)
        except Exception as exc:  # noqa: BLE001 - whatever the user's module raises
            reason = exc if isinstance(exc, ImportError) else f"{type(exc).__name__}: {exc}"
            yield f"actor_rollout_ref.model.external_lib={module} cannot be imported: {reason}"


def registered_names(config: PPOConfig) -> Iterator[str]:
    """Names must be in their registries. Runs after `user_modules`, which may register some."""
    from verl.workers.engine.registry import TrainEngineRegistry
    from verl.workers.rollout.registry import RolloutReplicaRegistry

    lookups: list[tuple[Callable[[str], object], str]] = [
        (_require_estimator, config.algorithm.adv_estimator),
        (_require_reward_manager, config.reward_model.reward_manager),
        (_require_loss, config.actor_rollout_ref.actor.policy_loss.loss_mode),
        (TrainEngineRegistry.require, config.actor_rollout_ref.actor.strategy),
        (RolloutReplicaRegistry.require_present, config.actor_rollout_ref.rollout.name),
    ]
    for look_up, name in lookups:
        try:
            look_up(name)
        except ConfigError as exc:
            yield str(exc)
    engines = RolloutReplicaRegistry.names()
    for name in config.actor_rollout_ref.rollout.engine_kwargs:
        if name not in engines:
            yield f"unknown engine actor_rollout_ref.rollout.engine_kwargs.{name}.{did_you_mean(name, engines)}"


def _require_estimator(name: str) -> None:
    """The default is there without torch, with which the others are registered; so it is with the next two."""
    from verl.trainer.ppo.needs import GRPO

    if name != GRPO:
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        get_adv_estimator_fn(name)


def _require_reward_manager(name: str) -> None:
    if name != "naive":
        from verl.workers.reward_manager import get_reward_manager_cls

        get_reward_manager_cls(name)


def _require_loss(name: str) -> None:
    if name != "vanilla":
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        get_policy_loss_fn(name)
