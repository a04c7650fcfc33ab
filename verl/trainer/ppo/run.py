"""One run of `main_ppo` from configuration to summary: check, build, start, train, end."""

from __future__ import annotations

import importlib
import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.checkpoint_engine.memory.arena import require_free_bytes
from verl.checkpoint_engine.plan.layout import align
from verl.checkpoint_engine.plan.types import ITEMSIZE, SyncReport
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.support.files import keep_private
from verl.trainer.checkpoints import CheckpointDirectory, warn_of_lacking_contents
from verl.trainer.config.validate import possible_fewer_ranks, with_ranks
from verl.trainer.fleet.cluster import Cluster
from verl.trainer.fleet.replicas import make_replicas
from verl.trainer.fleet.reward_models import AwakeForScoring, RewardModels
from verl.trainer.fleet.session import check_arguments, starts_locally
from verl.trainer.fleet.teachers import Teachers
from verl.trainer.ppo.data import build_dataloaders
from verl.trainer.ppo.distillation import require_routes, require_teachers
from verl.trainer.ppo.experience import needs_critic, needs_reference
from verl.trainer.ppo.generation import HealingRollouts
from verl.trainer.ppo.overview import in_force
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, TrainingResult
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.settled import scheduled, settled, total_steps
from verl.trainer.ppo.validation import Validator
from verl.trainer.telemetry import sync_spans
from verl.utils.config import ConfigError, to_mapping
from verl.utils.console import print_summary
from verl.utils.dataset import PromptLoader
from verl.utils.device import resolve_device
from verl.utils.model import (
    MODEL_KEY,
    expert_count,
    load_hf_config,
    load_tokenizer,
    require_vocabulary,
    resolve_model_path,
)
from verl.utils.model_files import require_embeddings, require_fit, require_whole_files, weight_shapes
from verl.utils.tracking import Tracking
from verl.workers.config import CriticConfig, FSDPConfig, HFModelConfig, PPOConfig
from verl.workers.engine.registry import check_engine
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.precision import names_kept_wide
from verl.workers.reward_manager import RewardManager
from verl.workers.rollout import RolloutReplica

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.trainer.metrics_server import MetricsServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is settled before any process is started."""

    config: PPOConfig
    device: str
    output_dir: Path
    checkpoints: CheckpointDirectory
    resume_from: Path | None
    model_path: Path
    arena_nbytes: int
    """Shared memory that each rollout node's arena will take."""
    replicas: list[RolloutReplica]
    agent_loop_manager_class: Any
    critic: CriticConfig | None
    loaders: dict[str, PromptLoader]
    reward_manager: RewardManager
    reward_models: RewardModels | None
    teachers: Teachers | None
    total_steps: int
    fewer_ranks: list[tuple[int, int]]
    """Hosts and ranks on each with which training may go on."""


def train(config: PPOConfig, trainer_class: type[RayPPOTrainer] = RayPPOTrainer) -> TrainingResult:
    """One run with the loop of `trainer_class`.

    Raises ConfigError for whatever the user has to change: before any process is started, where this host can tell,
    and before any weights are loaded, where it takes the Ray cluster to tell."""
    began = time.perf_counter()
    keep_private(config.trainer.files_for)
    job = _checked(settled(trainer_class.adapted(config)), trainer_class)
    for line in in_force(job.config, job.device):
        logger.info("%s", line)
    with (
        _metrics_server(job) as server,
        sync_spans() as spans,
        _tracking(job, server) as tracking,
        _scoring(job) as reward_manager,
        _cluster(job, [each.synced for each in (server, spans) if each is not None]) as cluster,
        _agent_loops(job, cluster) as manager,
    ):
        rollouts = HealingRollouts(manager, lambda: cluster.server_handles, cluster.recovery)
        trainer = trainer_class(
            config=job.config,
            cluster=cluster,
            rollouts=rollouts,
            reward_manager=reward_manager,
            train_dataloader=job.loaders["train"],
            validator=Validator(
                config=job.config,
                rollouts=rollouts,
                reward_manager=reward_manager,
                dataloader=job.loaders["val"],
            ),
            checkpoints=job.checkpoints,
            tracking=tracking,
            total_steps=job.total_steps,
        )
        result = trainer.fit(job.resume_from)
    _summarise(result, job.output_dir, time.perf_counter() - began)
    return result


def _checked(config: PPOConfig, trainer_class: type[RayPPOTrainer]) -> _Job:
    """Raises ConfigError or BackendUnavailable for all that this host can tell."""
    torch.manual_seed(config.trainer.seed)
    device = resolve_device(config.trainer.device)
    check_arguments(config.ray_kwargs.ray_init)
    output_dir = _writable("trainer.default_local_dir", config.trainer.output_dir)
    _require_writable_files(config)
    checkpoints = CheckpointDirectory(config.trainer)
    if config.trainer.save_freq > 0:
        warn_of_lacking_contents("actor_rollout_ref.actor.checkpoint", config.actor_rollout_ref.actor.checkpoint)
        if needs_critic(config):
            warn_of_lacking_contents("critic.checkpoint", config.critic.checkpoint)
    resume_from = checkpoints.find()
    model_path = resolve_model_path(config.actor_rollout_ref.model.path)
    _require_model(config.actor_rollout_ref.model, model_path)
    _require_positions(config)
    _require_heads(config)
    _require_experts(config)
    adapters = _adapter_shapes(config, model_path)
    policy = config.actor_rollout_ref.model.at(model_path)
    _require_policy_engines(config, policy, device)
    arena_nbytes = _arena_nbytes(config, model_path, adapters)
    _require_of_this_host(config, arena_nbytes)
    replicas = make_replicas(config, model_path=model_path, device=device)
    agent_loop_manager_class = _agent_loop_manager_class(config)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    require_embeddings(tokenizer, load_hf_config(config.actor_rollout_ref.model), f"{MODEL_KEY}.path={model_path}")
    loaders = build_dataloaders(config, tokenizer, agent_loop_manager_class)
    if resume_from is not None:
        loaders["train"].check(trainer_class.position_in_data(checkpoints.read(resume_from).dataloader))
    steps = total_steps(config, len(loaders["train"]))
    config = scheduled(config, steps)
    return _Job(
        config=config,
        device=device,
        output_dir=output_dir,
        checkpoints=checkpoints,
        resume_from=resume_from,
        model_path=model_path,
        arena_nbytes=arena_nbytes,
        replicas=replicas,
        agent_loop_manager_class=agent_loop_manager_class,
        critic=_local_critic(config, tokenizer, model_path, device),
        loaders=loaders,
        reward_manager=load_reward_manager(config, tokenizer),
        reward_models=RewardModels(config, device) if config.reward_model.enable else None,
        teachers=_teachers(config, tokenizer, loaders, device),
        total_steps=steps,
        fewer_ranks=_fewer_ranks(config, policy, device),
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
            _require_policy_engines(with_ranks(config, *layout), policy, device)
            found.append(layout)
        except ConfigError as exc:
            refusal = refusal or exc
    if refusal is not None and not found:
        raise ConfigError(f"trainer.min_ranks={config.trainer.min_ranks} allows no fewer ranks: {refusal}") from refusal
    return found


def _scoring(job: _Job) -> RewardManager:
    return job.reward_manager if job.reward_models is None else AwakeForScoring(job.reward_manager, job.reward_models)


def _metrics_server(job: _Job) -> AbstractContextManager[MetricsServer | None]:
    trainer = job.config.trainer
    if trainer.metrics_port is None:
        return nullcontext()
    from verl.trainer.metrics_server import MetricsServer  # needs prometheus_client

    server = MetricsServer(trainer.metrics_port, trainer.metrics_host)
    logger.info("metrics for Prometheus: http://%s:%d/metrics", trainer.metrics_host, server.port)
    return server


def _tracking(job: _Job, server: MetricsServer | None) -> Tracking:
    trainer = job.config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        job.output_dir,
        to_mapping(job.config),
        total_steps=job.total_steps,
        resume_step=job.checkpoints.read(job.resume_from).step if job.resume_from else 0,
        also=[server] if server is not None else [],
    )


def _cluster(job: _Job, on_sync: Sequence[Callable[[SyncReport], None]]) -> Cluster:
    return Cluster(
        job.config,
        model_path=job.model_path,
        device=job.device,
        replicas=job.replicas,
        arena_nbytes=job.arena_nbytes,
        with_reference=needs_reference(job.config),
        critic=job.critic,
        reward_models=job.reward_models,
        teachers=job.teachers,
        on_sync=on_sync,
        fewer_ranks=job.fewer_ranks,
    )


def _agent_loops(job: _Job, cluster: Cluster) -> Any:
    tokenizer_path = job.config.actor_rollout_ref.model.tokenizer_path or job.model_path
    return job.agent_loop_manager_class(job.config, cluster.server_handles, tokenizer_path)


def _require_model(model: HFModelConfig, directory: Path) -> None:
    """The files of the policy, and of a tokenizer elsewhere, are whole, and its weights are those of its config."""
    if model.tokenizer_path is not None and Path(model.tokenizer_path).expanduser().is_dir():
        require_whole_files(Path(model.tokenizer_path).expanduser(), f"{MODEL_KEY}.tokenizer_path")
    key = f"{MODEL_KEY}.path"
    require_whole_files(directory, key)
    shapes = weight_shapes(directory, key)
    require_fit(load_hf_config(model), shapes, key, remote=model.trust_remote_code)


def _require_policy_engines(config: PPOConfig, model: HFModelConfig, device: str) -> None:
    """The actor's engine, and that of the reference policy, can hold the model in the local directory `model.path`."""
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    _require_engine(config, actor.strategy, actor.fsdp_config, model, device)
    if needs_reference(config) and ref.fsdp_config != actor.fsdp_config:
        _require_engine(config, actor.strategy, ref.fsdp_config, model, device)


def _require_engine(
    config: PPOConfig, strategy: str, fsdp: FSDPConfig, model: HFModelConfig, device: str, labels: int = 0
) -> None:
    """Engines of `strategy` can hold it; `labels` as a critic has them."""
    check_engine(
        strategy,
        fsdp=fsdp,
        megatron=config.actor_rollout_ref.actor.megatron,
        model=model,
        world_size=config.trainer.world_size,
        device=device,
        labels=labels,
    )


def _local_critic(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, policy: Path, device: str
) -> CriticConfig | None:
    """The critic with a local directory in the place of a built-in name; None for a run without one.

    Raises ConfigError for a model that does not read the tokens of `tokenizer`, the policy's, or that no engine holds.
    """
    if not needs_critic(config):
        return None
    critic, model = config.critic, config.critic.model
    if model.path is not None:
        path = resolve_model_path(model.path)
        require_whole_files(path, "critic.model.path")
        shapes = weight_shapes(path, "critic.model.path")
        require_vocabulary(tokenizer, path, "critic.model.path", trust_remote_code=model.trust_remote_code)
        hf_config = load_hf_config(critic.hf_model(str(policy)).at(path))
        require_fit(hf_config, shapes, "critic.model.path", remote=model.trust_remote_code)
        critic = replace(critic, model=replace(model, path=str(path)))
    _require_engine(config, critic.strategy, critic.fsdp, critic.hf_model(str(policy)), device, labels=1)
    return critic


def _agent_loop_manager_class(config: PPOConfig) -> Any:
    """The agent loops. Named by configuration: this package lies below `verl.experimental` and does not import it.

    A context manager and a `Rollouts`, made from (config, server handles, tokenizer directory), with
    `check_config`, and with `shown_tools` if its prompts show tools.
    """
    target = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    module, _, name = target.partition(":")
    try:
        manager_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"rollout.agent.agent_loop_manager_class={target!r} is not module:Class: {exc}") from exc
    manager_class.check_config(config)
    return manager_class


def _require_positions(config: PPOConfig) -> None:
    """The model has a position for every token of the longest sequence, unless its RoPE is stretched beyond them."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    model = load_hf_config(config.actor_rollout_ref.model)
    limit = getattr(model, "max_position_embeddings", None)
    stretched = (getattr(model, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    needed = data.max_prompt_length + data.max_response_length
    if limit is not None and needed > limit and not stretched:
        raise ConfigError(
            f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length={data.max_response_length} = "
            f"{needed} tokens, but {config.actor_rollout_ref.model.path} has max_position_embeddings={limit}"
        )
    if limit is not None and (rollout.max_model_len or 0) > limit and not stretched:
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}, but "
            f"{config.actor_rollout_ref.model.path} has max_position_embeddings={limit}"
        )


def _require_heads(config: PPOConfig) -> None:
    """Every rank of a replica gets whole attention heads."""
    policy = config.actor_rollout_ref
    heads = getattr(load_hf_config(policy.model), "num_attention_heads", None)
    if heads is not None and heads % policy.rollout.tensor_model_parallel_size:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={policy.rollout.tensor_model_parallel_size} does "
            f"not divide the {heads} attention heads of {policy.model.path}"
        )


def _require_experts(config: PPOConfig) -> None:
    """Data-parallel ranks are one replica because they share experts."""
    policy = config.actor_rollout_ref
    if policy.rollout.data_ranks > 1 and not expert_count(load_hf_config(policy.model)):
        raise ConfigError(
            f"actor_rollout_ref.rollout.expert_parallel_size={policy.rollout.expert_parallel_size}: the model "
            f"{policy.model.path} has no experts to deal out; set it to 1"
        )


def _adapter_shapes(config: PPOConfig, model_path: Path) -> list[tuple[int, ...]]:
    """Raises ConfigError if LoRA's target modules are not there, BackendUnavailable if its package is not."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return []
    local = model.at(model_path)
    if config.actor_rollout_ref.actor.strategy == "megatron":
        from verl.workers.engine.megatron.adapted import with_adapters

        _, shapes = with_adapters(local, load_hf_config(local))
    else:
        from verl.workers.engine.fsdp.model import adapter_shapes

        shapes = adapter_shapes(local)
    return list(shapes.values())


def _arena_nbytes(config: PPOConfig, model_path: Path, adapters: Sequence[tuple[int, ...]]) -> int:
    """Shared memory that each rollout node's arena will take. `adapters` are the shapes of those of the model."""
    itemsize = ITEMSIZE[config.actor_rollout_ref.rollout.dtype]
    if config.actor_rollout_ref.model.sends_adapters:
        sizes = [math.prod(shape) * itemsize for shape in adapters]
    else:
        with HFCheckpoint(model_path) as checkpoint:
            wide = names_kept_wide(checkpoint.shapes, checkpoint)
            sizes = [
                math.prod(shape) * (max(itemsize, ITEMSIZE["float32"]) if name in wide else itemsize)
                for name, shape in checkpoint.shapes.items()
            ]
    return sum(map(align, sizes)) * config.checkpoint_engine.slots


def _require_of_this_host(config: PPOConfig, arena_nbytes: int) -> None:
    """What this machine needs if the rollout nodes are on it. Raises ConfigError or BackendUnavailable.

    Checked here, before anything starts; other machines are asked by the cluster, before their engines start.
    """
    colocated = config.trainer.placement == "colocated"
    if not colocated and not starts_locally(config.ray_kwargs.ray_init):
        return
    arenas = 1 if colocated else config.actor_rollout_ref.rollout.nnodes
    require_free_bytes(envs.shm_dir(), arena_nbytes, arenas=arenas)
    resolve_backend(config.checkpoint_engine).check_host(config.checkpoint_engine)


def _require_writable_files(config: PPOConfig) -> None:
    """Raises ConfigError for what a run would find out when it has begun, or at its end."""
    for key, directory in (
        ("trainer.rollout_data_dir", config.trainer.rollout_data_dir),
        ("trainer.validation_data_dir", config.trainer.validation_data_dir),
    ):
        if directory is not None:
            _writable(key, directory)
    for key, file in (
        ("checkpoint_engine.report_path", config.checkpoint_engine.report_path),
        ("ray_kwargs.timeline_json_file", config.ray_kwargs.timeline_json_file),
    ):
        if file is not None:
            _writable(f"the directory of {key}", str(Path(file).parent))
            if Path(file).is_dir():
                raise ConfigError(f"{key}={file} is a directory, not a file")


def _writable(what: str, directory: str) -> Path:
    """Raises ConfigError unless files can be created in `directory`, which is made if need be."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory):
            return Path(directory)
    except OSError as exc:
        raise ConfigError(f"{what}={directory} is not writable: {exc.strerror}") from exc


def _summarise(result: TrainingResult, output_dir: Path, seconds: float) -> None:
    names = ("metrics.jsonl", "sync_reports.jsonl", "tensorboard", f"global_step_{result.step}")
    artefacts = {name: output_dir / name for name in names if (output_dir / name).exists()}
    print_summary(result.rewards_before, result.rewards_after, artefacts)
    logger.info("%d steps in %.0f s", result.step, seconds)
