"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from verl.utils.config import ConfigError, option

DEFAULT_LR = 1e-6


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float | None = option(None, "peak learning rate; null: 1e-6, or what suits a built-in model", least=0)
    lr_warmup_steps: int = option(-1, "linear warm-up steps; negative: lr_warmup_steps_ratio of the total", least=-1)
    lr_warmup_steps_ratio: float = option(0.0, "warm-up as a share of total_training_steps", least=0, most=1)
    lr_warmup_init: float = option(0.0, "learning rate from which the warm-up rises", least=0)
    zero_indexed_step: bool = option(
        True, "the first step has the rate from which the warm-up rises; false: every rate comes one step earlier"
    )
    lr_scheduler_type: str = option("constant", "after the warm-up", choices=("constant", "cosine", "linear"))
    min_lr_ratio: float = option(0.0, "cosine and linear end at this share of lr", least=0, most=1)
    num_cycles: float = option(
        0.5, "waves of a cosine; a half falls to min_lr_ratio, one comes back to lr by the last step", least=0
    )
    weight_decay: float = option(0.01, "decoupled weight decay", least=0)
    decay_norms_and_biases: bool = option(
        True, "weight_decay is that of every parameter; false: not of norms, biases and whatever has one dimension"
    )
    betas: list[float] = option([0.9, 0.999], "Adam's exponential decay rates", least=0, below=1)
    total_training_steps: int = option(-1, "length of the schedule; set by the trainer when negative", least=-1)

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ConfigError(f"optim.betas takes two numbers, not {self.betas}")

    @property
    def peak_lr(self) -> float:
        return DEFAULT_LR if self.lr is None else self.lr
