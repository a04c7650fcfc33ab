"""What `--check` knows of the built-in job without computing it: its model and its data are the project's own.

A launch that changes only keys of FREE has the model, the data, the engines and the algorithm of the default job, of
which the whole check finds nothing wrong. What is left to check needs neither torch nor transformers nor Ray, so that
`--check` answers within a second or two. Every other launch, and every launch with something wrong, is for `plan`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.memory.arena import require_free_bytes
from verl.checkpoint_engine.plan.layout import align
from verl.checkpoint_engine.plan.types import ITEMSIZE
from verl.checkpoint_engine.support import envs
from verl.trainer.checkpoints import CheckpointDirectory
from verl.trainer.config.checking import Checked
from verl.trainer.config.validate import problems_of
from verl.trainer.ppo.overview import lines
from verl.trainer.ppo.settled import scheduled, settled, total_steps
from verl.trainer.ppo.surroundings import absent_interfaces, memory_for_weights, taken_ports, unseen_hosts, unwritable
from verl.utils import builtin
from verl.utils.builtin.arithmetic import number_of_problems
from verl.utils.config import ConfigError
from verl.utils.model_files import Tensors, require_whole_files, weight_tensors
from verl.utils.tracking import missing_packages
from verl.workers.config import PPOConfig

FREE = (
    "actor_rollout_ref.actor.clip_",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.kl_loss_",
    "actor_rollout_ref.actor.optim.",
    "actor_rollout_ref.actor.ppo_",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.ref.log_prob_",
    "actor_rollout_ref.rollout.log_prob_",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "critic.optim.",
    "critic.ppo_",
    "critic.use_dynamic_bsz",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.seed",
    "data.shuffle",
    "data.train_batch_size",
    "data.val_batch_size",
    "trainer.",
)
"""Keys that the checks of model, data and engines do not read, and those that are held against the numbers below."""
NOT_FREE = ("trainer.full_determinism", "trainer.min_ranks", "trainer.placement", "trainer.device")
MODEL_FILES = ("config.json", "tokenizer.json")


def known_good(config: PPOConfig) -> Checked | None:
    """The findings about a run in hybrid mode on CPUs; None if only `plan` can tell, also what is wrong."""
    if config.trainer.device != "cpu" or any(not _is_free(key) for key in _changed(config, PPOConfig())):
        return None
    if not _has_room(config):
        return None
    try:
        if problems_of(config) or any(unwritable(config)):
            return None
        model = builtin.builtin_model(config.actor_rollout_ref.model.path)
        require_whole_files(model, "actor_rollout_ref.model.path")
        arena_nbytes = _nbytes_of_arena(config, weight_tensors(model, "actor_rollout_ref.model.path"))
        require_free_bytes(envs.shm_dir(), arena_nbytes)
        data = [builtin.builtin_data(str(config.data.train_files), split) for split in ("train", "test")]
        if CheckpointDirectory(config.trainer).would_resume_from() is not None:
            return None  # whether it is of this model, torch can tell
    except (ConfigError, BackendUnavailable):
        return None
    if not (all((model / name).is_file() for name in MODEL_FILES) and _positions(model, config) and _whole(data)):
        return None
    steps = total_steps(config, number_of_training_samples() // config.data.train_batch_size)
    return Checked(
        plan=list(
            lines(scheduled(settled(config), steps), "cpu", steps, memory=memory_for_weights(config, arena_nbytes))
        ),
        lacking=[
            *missing_packages(config.trainer.logger),
            *taken_ports(config),
            *absent_interfaces(config, "cpu"),
            *unseen_hosts(config),
        ],
    )


def number_of_training_samples() -> int:
    """Of `builtin:arithmetic`."""
    return number_of_problems("train")


def _changed(config: Any, default: Any, prefix: str = "") -> Iterator[str]:
    """The keys in which the two differ."""
    for field in fields(config):
        key, value, other = prefix + field.name, getattr(config, field.name), getattr(default, field.name)
        if is_dataclass(value) and type(value) is type(other):
            yield from _changed(value, other, f"{key}.")
        elif value != other and not (key == "trainer.device" and value == "cpu"):
            yield key


def _is_free(key: str) -> bool:
    return key not in NOT_FREE and any(key == free or (free[-1] in "._" and key.startswith(free)) for free in FREE)


def _has_room(config: PPOConfig) -> bool:
    """As many samples as a batch has, and prompts that are at least as long as those of the data."""
    data, default = config.data, PPOConfig().data
    return (
        0 < data.train_batch_size <= number_of_training_samples()
        and data.max_prompt_length >= default.max_prompt_length
    )


def _nbytes_of_arena(config: PPOConfig, tensors: Tensors) -> int:
    """Of the built-in model, whose tensors all have the rollout's dtype in the engine."""
    itemsize = ITEMSIZE[config.actor_rollout_ref.rollout.dtype]
    nbytes = sum(align(math.prod(shape) * itemsize) for _, shape in tensors.values())
    return nbytes * config.checkpoint_engine.slots


def _positions(model: Path, config: PPOConfig) -> bool:
    try:
        limit: int = json.loads((model / "config.json").read_text("utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return config.data.max_prompt_length + config.data.max_response_length <= limit


def _whole(files: list[Path]) -> bool:
    """Parquet begins and ends with the same four letters."""
    try:
        return all(content[:4] == content[-4:] == b"PAR1" for content in (file.read_bytes() for file in files))
    except OSError:
        return False
