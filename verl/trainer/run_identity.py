"""Names what two runs must have in common for one to train on samples of the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from verl.utils.config import to_mapping
from verl.utils.dataset import fingerprint
from verl.utils.model import resolve_model_path
from verl.workers.config import PPOConfig

READ_NBYTES = 2**32
"""Larger models are compared by the sizes and times of their files."""
CODE_NBYTES = 2**26
"""Larger files that settings name are data, of which `source` tells."""
_APART = ("model", "actor", "ref", "rollout")
_ALIKE = ("data", "critic", "algorithm", "reward_model", "custom_reward_function", "distillation", "async_training")


def identity_of(config: PPOConfig, loop: str, source: str) -> dict[str, str]:
    """Digests by name: job, seed, data, model and all settings that decide about samples and their order.

    `loop` is the name of the trainer's class, `source` the fingerprint of the training files.
    """
    trainer, settings = config.trainer, to_mapping(config)
    named: dict[str, Any] = {
        "experiment": [trainer.project_name, trainer.experiment_name, loop],
        "seed": trainer.seed,
        "training data": source,
        "model": list(_contents(resolve_model_path(config.actor_rollout_ref.model.path, need_tokenizer=False))),
        "actor_rollout_ref": {
            name: value for name, value in settings["actor_rollout_ref"].items() if name not in _APART
        },
        **{f"actor_rollout_ref.{name}": settings["actor_rollout_ref"][name] for name in _APART},
        **{name: settings[name] for name in _ALIKE},
    }
    named["file of settings"] = [fingerprint([path]) for path in sorted(set(_files_in(named)))]
    return {name: xxhash.xxh3_128(json.dumps(value, default=str).encode()).hexdigest() for name, value in named.items()}


def _contents(directory: Path) -> Iterator[Any]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    is_read = sum(path.stat().st_size for path in files) <= READ_NBYTES
    for path in files:
        stat = path.stat()
        yield str(path.relative_to(directory)), fingerprint([path]) if is_read else [stat.st_size, stat.st_mtime_ns]


def _files_in(value: Any) -> Iterator[Path]:
    """The files whose paths are values of settings: rewards, tools, agent loops."""
    if isinstance(value, str):
        path = Path(value)
        try:
            if "/" in value and path.is_file() and path.stat().st_size <= CODE_NBYTES:
                yield path
        except (OSError, ValueError):
            return
    elif isinstance(value, Mapping):
        yield from _files_in(list(value.values()))
    elif isinstance(value, Iterable):
        for item in value:
            yield from _files_in(item)
