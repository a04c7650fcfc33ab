"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from verl.utils.config import ConfigError, option

DEFAULT_LR = 1e-6


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float | None = option(None, "peak learning rate; null: 1e-6, or what suits a built-in model")
    lr_warmup_steps: int = option(-1, "linear warm-up steps; negative: lr_warmup_steps_ratio of the total")
    lr_warmup_steps_ratio: float = option(0.0, "warm-up as a share of total_training_steps")
    lr_scheduler_type: str = option("constant", "after the warm-up", choices=("constant", "cosine"))
    min_lr_ratio: float = option(0.0, "cosine ends at this share of lr")
    weight_decay: float = option(0.01, "decoupled weight decay")
    betas: list[float] = option([0.9, 0.999], "Adam's exponential decay rates")
    total_training_steps: int = option(-1, "length of the schedule; set by the trainer when negative")

    def __post_init__(self) -> None:
        if self.lr is not None and self.lr < 0:
            raise ConfigError(f"optim.lr must not be negative, not {self.lr}")
        if len(self.betas) != 2:
            raise ConfigError(f"optim.betas takes two numbers, not {self.betas}")

    @property
    def peak_lr(self) -> float:
        return DEFAULT_LR if self.lr is None else self.lr
