"""The learning rate as a pure function of the training step."""

from __future__ import annotations

import math

from verl.utils.config import ConfigError
from verl.workers.config.optim import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Rate in training step `step`, counted from 0.

    The warm-up rises linearly from `lr_warmup_init` and reaches the peak in the step after it, as verl's; without
    `zero_indexed_step` every rate comes one step earlier. Raises ConfigError when the length of the schedule is needed
    and unknown.
    """
    step += not config.zero_indexed_step
    total, warmup = config.total_training_steps, config.lr_warmup_steps
    if warmup < 0:
        ratio = config.lr_warmup_steps_ratio
        warmup = int(ratio * _known(total, "lr_warmup_steps_ratio")) if ratio > 0 else 0
    if step < warmup:
        return config.lr_warmup_init + (config.peak_lr - config.lr_warmup_init) * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.peak_lr
    decay_steps = max(1, _known(total, f"lr_scheduler_type={config.lr_scheduler_type}") - warmup)
    progress = min(1.0, (step - warmup) / decay_steps)
    waves = 2.0 * config.num_cycles * progress
    left = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * waves))
    return config.peak_lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def _known(total: int, needed_by: str) -> int:
    if total < 0:
        raise ConfigError(f"optim.{needed_by} needs optim.total_training_steps")
    return total
