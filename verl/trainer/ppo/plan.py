"""Implements `--check`: checks and describes a run on this machine, without starting a process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.memory.arena import require_free_bytes
from verl.checkpoint_engine.support import envs
from verl.trainer.checkpoints import CheckpointDirectory
from verl.trainer.config.checking import Checked
from verl.trainer.fleet.replicas import make_replicas
from verl.trainer.fleet.reward_models import reward_function
from verl.trainer.ppo.data import build_dataloaders, unheard_interactions
from verl.trainer.ppo.distillation import require_routes, require_teachers
from verl.trainer.ppo.job import load_agent_loop_manager, local_critic
from verl.trainer.ppo.overview import lines
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.requirements import (
    nbytes_of_arena,
    require_engine_rotates_as_trainer,
    require_experts,
    require_heads,
    require_model,
    require_model_of_run,
    require_policy_engines,
    require_positions,
    require_room_for_a_sequence,
    require_sight,
    require_text_of_wrapper,
    shapes_of_adapters,
)
from verl.trainer.ppo.settled import scheduled, settled, total_steps
from verl.trainer.ppo.surroundings import (
    absent_interfaces,
    memory_for_weights,
    starts_ray,
    taken_ports,
    unseen_hosts,
    unwritable,
)
from verl.utils import builtin
from verl.utils.config import ConfigError
from verl.utils.device import missing, resolve_device
from verl.utils.language_model import SEEING
from verl.utils.model import MODEL_KEY, load_hf_config, load_tokenizer, resolve_model_path
from verl.utils.model_files import require_embeddings
from verl.utils.pictures import PictureProcessor, load_processor
from verl.utils.tracking import missing_packages
from verl.workers.config import PPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
OF_STAND_IN = re.compile(r"\b(the|a) model\b|\bnum_hidden_layers\b|\bbuiltin:|\btraining samples\b|\bof its layers\b")
"""Matches problems that a stand-in for the model or the data causes, and not the keys of the launch."""

OF_FILES = re.compile(r"\b(no such file|is a directory|is a pattern)\b")
"""Matches problems with files that the launch names, though their remedy may name a built-in one."""


def plan(config: PPOConfig, trainer_class: type[RayPPOTrainer], *, pictures: bool = False) -> Checked:
    """All problems of a run with the loop of `trainer_class`, and its description if there are none. `pictures`: a
    built-in model, which reads text, stands in for one that sees."""
    checked = Checked()
    attempt = _Attempt(checked)
    adapted = attempt(lambda: trainer_class.adapted(config))
    config = settled(adapted or config)
    device = resolve_device(config.trainer.device)
    if absent := missing(device):
        attempt.lacks(f"trainer.device={device}: {absent}")
    attempt(lambda: reward_function(config), stands_in=builtin.is_builtin(config.reward_model.model.path or ""))
    attempt(lambda: require_sight(config, stood_in_for=pictures))
    if pictures:
        checked.stand_ins.append(
            f"stand-in: {config.actor_rollout_ref.model.path} reads text: that the run's own model sees "
            f"({', '.join(SEEING)}), and how it reads pictures, is not checked"
        )
        if config.actor_rollout_ref.rollout.name == "vllm" and find_spec("torchvision") is None:
            attempt.lacks("torchvision, with which vLLM builds models that see")
    path = attempt(lambda: resolve_model_path(config.actor_rollout_ref.model.path))
    steps = _look_at_model(config, path, device, attempt) if path is not None else None
    checked.problems.extend(unwritable(config))
    checked.lacking.extend((*missing_packages(config.trainer.logger), *taken_ports(config)))
    checked.lacking.extend((*absent_interfaces(config, device), *unseen_hosts(config)))
    memory = _look_at_memory(config, path, attempt) if path is not None else None
    resume_from = attempt(CheckpointDirectory(config.trainer).would_resume_from)
    if (saved := resume_from) is not None and path is not None:
        attempt(lambda: require_model_of_run(config, saved))
    if not checked.problems:
        checked.plan.extend(lines(scheduled(config, steps or -1), device, steps, resume_from, memory))
    return checked


class _Attempt:
    """Calls, and adds what is wrong to the problems, to what a built-in stand-in is too small for, or to what is not on
    this machine."""

    def __init__(self, checked: Checked) -> None:
        self._checked = checked

    def warns(self, lines: Sequence[str] | None) -> None:
        self._checked.warnings.extend(lines or ())

    def lacks(self, what: str) -> None:
        """Of this machine."""
        self._checked.lacking.append(what)

    def __call__(self, call: Callable[[], T], *, stands_in: bool = False) -> T | None:
        try:
            return call()
        except BackendUnavailable as exc:
            self._checked.lacking.append(str(exc))
            return None
        except ConfigError as exc:
            for line in str(exc).splitlines():
                of_stand_in = OF_STAND_IN.search(line) and not OF_FILES.search(line)
                if stands_in and not isinstance(exc, builtin.UnknownBuiltin) and of_stand_in:
                    self._checked.stand_ins.append(f"stand-in: {line}")
                elif not self._is_told(line):
                    self._checked.problems.append(line)
            return None

    def _is_told(self, line: str) -> bool:
        """Whether another check has refused a model for the same reason."""
        key, _, why = line.partition(": ")
        return "model.path" in key and any(known.endswith(f": {why}") for known in self._checked.problems)


def _look_at_model(config: PPOConfig, path: Path, device: str, attempt: _Attempt) -> int | None:
    """The number of steps, if it is known."""
    model = config.actor_rollout_ref.model
    local = model.at(path)
    stands_in = builtin.is_builtin(model.path)
    attempt(lambda: require_model(model, path))
    attempt(lambda: require_positions(config), stands_in=stands_in)
    attempt(lambda: require_engine_rotates_as_trainer(config), stands_in=stands_in)
    attempt(lambda: require_heads(config), stands_in=stands_in)
    attempt(lambda: require_room_for_a_sequence(config, device), stands_in=stands_in)
    attempt(lambda: require_text_of_wrapper(config), stands_in=stands_in)
    attempt(lambda: require_experts(config), stands_in=stands_in)
    attempt(lambda: shapes_of_adapters(config, path), stands_in=stands_in)
    attempt(lambda: require_policy_engines(config, local, device), stands_in=stands_in)
    attempt(lambda: make_replicas(config, model_path=path, device=device))
    tokenizer = attempt(lambda: load_tokenizer(model))
    if tokenizer is None:
        return None
    attempt(lambda: require_embeddings(tokenizer, load_hf_config(model), f"{MODEL_KEY}.path={path}"))
    if config.distillation.enabled:
        _look_at_teachers(config, tokenizer, device, attempt)
    critic_stands_in = builtin.is_builtin(config.critic.model.path or model.path)
    attempt(lambda: local_critic(config, tokenizer, path, device), stands_in=critic_stands_in)
    processor = attempt(lambda: load_processor(path, load_hf_config(model)))
    return _look_at_data(config, tokenizer, processor, attempt)


def _look_at_memory(config: PPOConfig, path: Path, attempt: _Attempt) -> str | None:
    """The line of the plan, if the model's files tell. Without enough of it, this is not the host of the run."""
    try:
        arena_nbytes = nbytes_of_arena(config, path, shapes_of_adapters(config, path))
    except (ConfigError, BackendUnavailable):
        return None  # another check has refused the model
    if starts_ray(config):
        try:
            require_free_bytes(envs.shm_dir(), arena_nbytes, arenas=config.actor_rollout_ref.rollout.nnodes)
        except ConfigError as exc:
            attempt.lacks(str(exc))
    return memory_for_weights(config, arena_nbytes)


def _look_at_teachers(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device: str, attempt: _Attempt) -> None:
    """Where a built-in model stands in for the user's student, the teacher's files need not be here either."""
    paths = {name: teacher.model_path or "" for name, teacher in config.distillation.teachers.items()}
    stands_in = builtin.is_builtin(config.actor_rollout_ref.model.path)
    absent = [
        name for name, path in paths.items() if not (builtin.is_builtin(path) or Path(path).expanduser().is_dir())
    ]
    if stands_in and absent:
        for name in absent:
            key = f"distillation.teacher_models.{name}.model_path"
            attempt.lacks(f"{key}={paths[name]} must be a directory where the run starts")
        return
    stands_in = stands_in or any(map(builtin.is_builtin, paths.values()))
    attempt(lambda: require_teachers(config, tokenizer, device), stands_in=stands_in)


def _look_at_data(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, processor: PictureProcessor | None, attempt: _Attempt
) -> int | None:
    """The number of steps, if it is known."""
    files = config.data.train_files
    stands_in = isinstance(files, str) and builtin.is_builtin(files)
    manager_class = attempt(lambda: load_agent_loop_manager(config))
    if manager_class is None:
        return None
    loaders = attempt(lambda: build_dataloaders(config, tokenizer, manager_class, processor), stands_in=stands_in)
    if loaders is None:
        return None
    if config.distillation.enabled:
        attempt(lambda: require_routes(config, loaders["train"]), stands_in=stands_in)
    attempt.warns(attempt(lambda: unheard_interactions(config, loaders, manager_class), stands_in=stands_in))
    return attempt(lambda: total_steps(config, len(loaders["train"])))
