"""The checked settings of a run: what the driver's host can determine before any process starts."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.trainer.checkpoints import CheckpointDirectory, warn_of_lacking_contents
from verl.trainer.config.validate import possible_fewer_ranks, with_ranks
from verl.trainer.fleet.replicas import make_replicas
from verl.trainer.fleet.reward_models import RewardModels
from verl.trainer.fleet.session import check_arguments
from verl.trainer.fleet.teachers import Teachers
from verl.trainer.ppo.data import build_dataloaders, unheard_interactions
from verl.trainer.ppo.distillation import require_routes, require_teachers
from verl.trainer.ppo.needs import needs_critic
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.requirements import (
    nbytes_of_arena,
    require_engine,
    require_engine_rotates_as_trainer,
    require_experts,
    require_heads,
    require_model,
    require_model_of_run,
    require_of_this_host,
    require_policy_engines,
    require_positions,
    require_room_for_a_sequence,
    require_sight,
    require_text_of_wrapper,
    require_writable,
    require_writable_files,
    shapes_of_adapters,
)
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.settled import scheduled, total_steps
from verl.trainer.ppo.surroundings import unfiltered_users
from verl.utils.config import ConfigError
from verl.utils.dataset import PromptLoader
from verl.utils.device import resolve_device
from verl.utils.language_model import is_wrapper, sees
from verl.utils.model import (
    MODEL_KEY,
    load_hf_config,
    load_tokenizer,
    require_vocabulary,
    resolve_model_path,
)
from verl.utils.model_files import require_embeddings, require_whole_files, weight_tensors
from verl.utils.pictures import load_processor
from verl.workers.config import CriticConfig, HFModelConfig, PPOConfig
from verl.workers.hf.fit import require_fit
from verl.workers.reward_manager import RewardManager
from verl.workers.rollout import RolloutReplica

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the driver has checked and decided before any process starts."""

    config: PPOConfig
    device: str
    output_dir: Path
    checkpoints: CheckpointDirectory
    resume_from: Path | None
    model_path: Path
    arena_nbytes: int
    """Bytes of shared memory for each rollout node's arena."""
    replicas: list[RolloutReplica]
    agent_loop_manager_class: Any
    critic: CriticConfig | None
    loaders: dict[str, PromptLoader]
    reward_manager: RewardManager
    reward_models: RewardModels | None
    teachers: Teachers | None
    total_steps: int
    fewer_ranks: list[tuple[int, int]]
    """Smaller shapes, as hosts and ranks on each, with which training may continue."""


def checked_job(config: PPOConfig, trainer_class: type[RayPPOTrainer]) -> Job:
    """Check a run on the driver's host. Raises ConfigError or BackendUnavailable for what it finds wrong."""
    torch.manual_seed(config.trainer.seed)
    device = resolve_device(config.trainer.device)
    check_arguments(config.ray_kwargs.ray_init)
    output_dir = require_writable("trainer.default_local_dir", config.trainer.output_dir)
    require_writable_files(config)
    checkpoints = CheckpointDirectory(config.trainer)
    if config.trainer.save_freq > 0:
        warn_of_lacking_contents("actor_rollout_ref.actor.checkpoint", config.actor_rollout_ref.actor.checkpoint)
        if needs_critic(config):
            warn_of_lacking_contents("critic.checkpoint", config.critic.checkpoint)
    resume_from = checkpoints.find()
    model_path = resolve_model_path(config.actor_rollout_ref.model.path)
    require_model(config.actor_rollout_ref.model, model_path)
    if resume_from is not None:
        require_model_of_run(config, resume_from)
    require_positions(config)
    require_engine_rotates_as_trainer(config)
    require_heads(config)
    require_room_for_a_sequence(config, device)
    require_text_of_wrapper(config)
    require_sight(config)
    require_experts(config)
    adapters = shapes_of_adapters(config, model_path)
    policy = config.actor_rollout_ref.model.at(model_path)
    require_policy_engines(config, policy, device)
    arena_nbytes = nbytes_of_arena(config, model_path, adapters)
    require_of_this_host(config, arena_nbytes)
    for line in unfiltered_users():
        logger.warning("%s", line)
    replicas = make_replicas(config, model_path=model_path, device=device)
    agent_loop_manager_class = load_agent_loop_manager(config)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    require_embeddings(tokenizer, load_hf_config(config.actor_rollout_ref.model), f"{MODEL_KEY}.path={model_path}")
    processor = load_processor(model_path, load_hf_config(config.actor_rollout_ref.model))
    loaders = build_dataloaders(config, tokenizer, agent_loop_manager_class, processor)
    for line in unheard_interactions(config, loaders, agent_loop_manager_class):
        logger.warning("%s", line)
    if resume_from is not None:
        loaders["train"].check(trainer_class.position_in_data(checkpoints.read(resume_from).dataloader))
    steps = total_steps(config, len(loaders["train"]))
    config = scheduled(config, steps)
    return Job(
        config=config,
        device=device,
        output_dir=output_dir,
        checkpoints=checkpoints,
        resume_from=resume_from,
        model_path=model_path,
        arena_nbytes=arena_nbytes,
        replicas=replicas,
        agent_loop_manager_class=agent_loop_manager_class,
        critic=local_critic(config, tokenizer, model_path, device),
        loaders=loaders,
        reward_manager=load_reward_manager(config, tokenizer),
        reward_models=RewardModels(config, device) if config.reward_model.enable else None,
        teachers=_teachers(config, tokenizer, loaders, device),
        total_steps=steps,
        fewer_ranks=_fewer_ranks(config, policy, device),
    )


def local_critic(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, policy: Path, device: str
) -> CriticConfig | None:
    """The critic's configuration, with a local directory in place of a built-in name; None without a critic.

    Raises ConfigError if its vocabulary is not that of `tokenizer` (the policy's), or no engine supports it.
    """
    if not needs_critic(config):
        return None
    critic, model = config.critic, config.critic.model
    if model.path is not None:
        path = resolve_model_path(model.path, key="critic.model.path")
        require_whole_files(path, "critic.model.path")
        tensors = weight_tensors(path, "critic.model.path")
        hf_config = load_hf_config(critic.hf_model(str(policy)).at(path))
        _require_same_sight(load_hf_config(config.actor_rollout_ref.model.at(policy)), policy, hf_config, path)
        require_vocabulary(tokenizer, path, "critic.model.path", trust_remote_code=model.trust_remote_code)
        if is_wrapper(hf_config):
            raise ConfigError(
                f"critic.model.path={path}: {hf_config.model_type} is more than a language model, and no model for a "
                "critic: give a language model"
            )
        require_fit(hf_config, tensors, "critic.model.path", remote=model.trust_remote_code, needs_head=False)
        critic = replace(critic, model=replace(model, path=str(path)))
    require_engine(config, critic.strategy, critic.fsdp, critic.hf_model(str(policy)), device, labels=1)
    return critic


def _require_same_sight(policy: PretrainedConfig, policy_path: Path, critic: PretrainedConfig, path: Path) -> None:
    """Raises ConfigError unless the critic makes of pictures what a policy that sees makes of them."""
    if not sees(policy):
        return
    theirs, own = load_processor(policy_path, policy), load_processor(path, critic)
    if own is None or theirs is None:
        raise ConfigError(
            f"critic.model.path={path}: {critic.model_type} reads text alone, and the policy sees pictures: give a "
            "model that sees, or null for the policy's own"
        )
    if other := own.difference(theirs):
        raise ConfigError(
            f"critic.model.path={path}: its pictures do not become what the policy's do: {', '.join(other)} differ"
        )


def _teachers(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, loaders: dict[str, PromptLoader], device: str
) -> Teachers | None:
    """Raises ConfigError for one that cannot score what the policy writes, and for data without one."""
    if not config.distillation.enabled:
        return None
    require_teachers(config, tokenizer, device)
    require_routes(config, loaders["train"])
    return Teachers(config, device)


def _fewer_ranks(config: PPOConfig, policy: HFModelConfig, device: str) -> list[tuple[int, int]]:
    """With which the policy's engines can hold it, too. Raises ConfigError if `trainer.min_ranks` leaves none."""
    found: list[tuple[int, int]] = []
    refusal: ConfigError | None = None
    for layout in possible_fewer_ranks(config):
        try:
            require_policy_engines(with_ranks(config, *layout), policy, device)
            found.append(layout)
        except ConfigError as exc:
            refusal = refusal or exc
    if refusal is not None and not found:
        raise ConfigError(f"trainer.min_ranks={config.trainer.min_ranks} allows no fewer ranks: {refusal}") from refusal
    return found


def load_agent_loop_manager(config: PPOConfig) -> Any:
    """The class of the agent loops, named by configuration: this package must not import `verl.experimental`.

    It is a context manager and a `Rollouts`, constructed from (config, server handles, tokenizer directory). It has
    `check_config`, and `shown_tools` if its prompts show tools.
    """
    target = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    module, _, name = target.partition(":")
    try:
        manager_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"rollout.agent.agent_loop_manager_class={target!r} is not module:Class: {exc}") from exc
    manager_class.check_config(config)
    return manager_class
