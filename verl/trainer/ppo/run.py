"""One run of `main_ppo` from configuration to summary: check, build, start, train, end."""

from __future__ import annotations

import importlib
import logging
import math
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from verl import envs
from verl.checkpoint_engine.arena import require_free_bytes
from verl.checkpoint_engine.layout import align
from verl.checkpoint_engine.types import ITEMSIZE
from verl.trainer.ppo.checkpoints import CheckpointDirectory
from verl.trainer.ppo.cluster import Cluster
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Rollouts, TrainingResult, needs_reference
from verl.trainer.ppo.validation import Validator
from verl.utils.config import ConfigError, to_mapping
from verl.utils.console import print_summary
from verl.utils.dataset import build_dataloader, build_dataset, resolve_data_files
from verl.utils.device import resolve_device
from verl.utils.model import load_tokenizer, resolve_model_path
from verl.utils.reward_score import load_reward_function
from verl.utils.tracking import Tracking
from verl.workers.config import PPOConfig
from verl.workers.engine.fsdp.hf_checkpoint import HFCheckpoint
from verl.workers.reward_manager import NaiveRewardManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def train(config: PPOConfig) -> TrainingResult:
    """Raises ConfigError for whatever the user has to change, before any process is started."""
    began = time.perf_counter()
    torch.manual_seed(config.trainer.seed)
    device = resolve_device(config.trainer.device)
    output_dir = _writable(Path(config.trainer.output_dir))
    checkpoints = CheckpointDirectory(config.trainer)
    resume_from = checkpoints.find()
    model_path = resolve_model_path(config.actor_rollout_ref.model.path)
    _require_arena_memory(config, model_path)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    loaders = _dataloaders(config, tokenizer)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loaders["train"])
    config = _with_schedule(config, total_steps)
    reward_manager = NaiveRewardManager(
        tokenizer,
        load_reward_function(config.custom_reward_function),
        num_workers=config.reward_model.num_workers,
        reward_fn_key=config.data.reward_fn_key,
    )
    with (
        Tracking(
            config.trainer.project_name,
            config.trainer.experiment_name,
            config.trainer.logger,
            output_dir,
            to_mapping(config),
            total_steps=total_steps,
            resume_step=checkpoints.read(resume_from).step if resume_from else 0,
        ) as tracking,
        Cluster(config, model_path=model_path, device=device, with_reference=needs_reference(config)) as cluster,
        _rollouts(config, cluster, model_path) as rollouts,
    ):
        validator = Validator(
            config=config, rollouts=rollouts, reward_manager=reward_manager, dataloader=loaders["val"]
        )
        trainer = RayPPOTrainer(
            config=config,
            cluster=cluster,
            rollouts=rollouts,
            reward_manager=reward_manager,
            train_dataloader=loaders["train"],
            validator=validator,
            checkpoints=checkpoints,
            tracking=tracking,
            total_steps=total_steps,
        )
        result = trainer.fit(resume_from)
    _summarise(result, output_dir, time.perf_counter() - began)
    return result


def _rollouts(config: PPOConfig, cluster: Cluster, model_path: Path) -> AbstractContextManager[Rollouts]:
    """The agent loops. Named by configuration: this package lies below `verl.experimental` and does not import it."""
    target = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    module, _, name = target.partition(":")
    try:
        manager_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"rollout.agent.agent_loop_manager_class={target!r} is not module:Class: {exc}") from exc
    tokenizer_path = config.actor_rollout_ref.model.tokenizer_path or model_path
    manager: AbstractContextManager[Rollouts] = manager_class(config, cluster.server_handles, tokenizer_path)
    return manager


def _dataloaders(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, StatefulDataLoader]:
    data = config.data
    train: Any = build_dataset(resolve_data_files(data.train_files, "train"), tokenizer, data, "train")
    val: Any = build_dataset(resolve_data_files(data.val_files, "val"), tokenizer, data, "val")
    if len(train) < data.train_batch_size:
        raise ConfigError(f"data.train_batch_size={data.train_batch_size} exceeds the {len(train)} training samples")
    return {
        "train": build_dataloader(train, data, batch_size=data.train_batch_size, shuffle=data.shuffle, drop_last=True),
        "val": build_dataloader(val, data, batch_size=data.val_batch_size or len(val), shuffle=False),
    }


def _with_schedule(config: PPOConfig, total_steps: int) -> PPOConfig:
    """Learning-rate schedules span the run unless the user set their length."""
    actor = config.actor_rollout_ref.actor
    if actor.optim.total_training_steps > 0:
        return config
    optim = replace(actor.optim, total_training_steps=total_steps)
    policy = replace(config.actor_rollout_ref, actor=replace(actor, optim=optim))
    return replace(config, actor_rollout_ref=policy)


def _require_arena_memory(config: PPOConfig, model_path: Path) -> None:
    """The node arena fits into shared memory. Checked here, because the engines take half a minute to start."""
    itemsize = ITEMSIZE[config.actor_rollout_ref.rollout.dtype]
    with HFCheckpoint(model_path) as checkpoint:
        nbytes = sum(align(math.prod(checkpoint.shape(name)) * itemsize) for name in checkpoint.names)
    require_free_bytes(envs.shm_dir(), nbytes * config.checkpoint_engine.slots)


def _writable(output_dir: Path) -> Path:
    """Raises ConfigError unless files can be created in `output_dir`, which is made if need be."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output_dir):
            return output_dir
    except OSError as exc:
        raise ConfigError(f"trainer.default_local_dir={output_dir} is not writable: {exc.strerror}") from exc


def _summarise(result: TrainingResult, output_dir: Path, seconds: float) -> None:
    names = ("metrics.jsonl", "sync_reports.jsonl", "tensorboard", f"global_step_{result.step}")
    artefacts = {name: output_dir / name for name in names if (output_dir / name).exists()}
    print_summary(result.rewards_before, result.rewards_after, artefacts)
    logger.info("%d steps in %.0f s", result.step, seconds)
