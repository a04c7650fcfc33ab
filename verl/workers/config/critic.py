"""The `critic` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.utils.config import ConfigError, option, section
from verl.utils.dropout import CHOICES, require_no_random
from verl.workers.config.actor import LOSS_AGG_MODES, CheckpointConfig, FSDPConfig
from verl.workers.config.model import REQUIRE_HELP, HFModelConfig, require_padding_removed
from verl.workers.config.optim import OptimizerConfig

DEFAULT_CRITIC_LR = 1e-5


@dataclass(frozen=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """AdamW and its schedule."""

    lr: float | None = option(None, "peak learning rate; null: 1e-5, or what suits a built-in model", least=0)

    @property
    def peak_lr(self) -> float:
        return DEFAULT_CRITIC_LR if self.lr is None else self.lr


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """What values are computed with."""

    path: str | None = option(
        None, "local Hugging Face directory, of a policy or of an exported critic; null: the policy's"
    )
    trust_remote_code: bool = option(False, "allow code from the model directory")
    external_lib: str | None = option(None, "module imported before the model is built")
    override_config: dict[str, Any] = option({}, "fields of the Hugging Face config to replace")
    dropout: str = option(
        "off",
        "off: updates drop nothing, whatever the model's config says; keep: they drop what it says",
        choices=CHOICES,
    )
    use_remove_padding: bool = option(
        False,
        "compute no padding: sequences share a row (fsdp and fsdp2, models that keep them apart there); null: where "
        "ranks share sequences (verl: true)",
        follows=True,
    )
    require_remove_padding: bool = option(False, REQUIRE_HELP)
    enable_gradient_checkpointing: bool = option(False, "recompute activations in the backward pass (verl: true)")

    def __post_init__(self) -> None:
        require_padding_removed(self.require_remove_padding, self.use_remove_padding)
        require_no_random(self.override_config, self.dropout)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """A model of the policy's kind that learns to predict returns. It shares the trainer's ranks."""

    enable: bool | None = option(None, "null: if algorithm.adv_estimator needs values")
    strategy: str = option(
        "fsdp2",
        "training engine; megatron: cut like actor_rollout_ref.actor.megatron; null: megatron if the actor's is",
        choices=("fsdp2", "megatron"),
        follows=True,
    )
    model: CriticModelConfig = section(CriticModelConfig)
    optim: CriticOptimizerConfig = section(CriticOptimizerConfig)
    fsdp: FSDPConfig = section(FSDPConfig)
    ppo_mini_batch_size: int | None = option(None, "prompts per optimizer step; null: the actor's", least=1)
    ppo_micro_batch_size_per_gpu: int | None = option(
        None, "sequences per forward pass and rank; null: use_dynamic_bsz", least=1
    )
    use_dynamic_bsz: bool = option(
        True, "pack micro-batches up to ppo_max_token_len_per_gpu tokens; null: as the actor", follows=True
    )
    ppo_max_token_len_per_gpu: int = option(
        16384, "token budget of one micro-batch and rank; null: the actor's (verl: 32768)", least=1, follows=True
    )
    ppo_epochs: int = option(1, "passes over each batch; null: the actor's", least=1, follows=True)
    shuffle: bool = option(False, "shuffle sequences between passes; null: the actor's", follows=True)
    data_loader_seed: int = option(42, "seed of critic.shuffle", least=0, below=2**32)
    cliprange_value: float = option(0.5, "values may leave those before the update by this much", above=0)
    grad_clip: float = option(1.0, "largest gradient norm", above=0)
    loss_agg_mode: str = option(
        "token-mean", "how token losses become one number; null: the actor's", choices=LOSS_AGG_MODES, follows=True
    )
    loss_scale_factor: float | None = option(
        None, "as the actor's, which it is unless set; null on the command line: its default", above=0, follows=True
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig)

    def __post_init__(self) -> None:
        if not self.use_dynamic_bsz and not self.ppo_micro_batch_size_per_gpu:
            raise ConfigError("ppo_micro_batch_size_per_gpu must be set when use_dynamic_bsz=false")

    def hf_model(self, policy_path: str) -> HFModelConfig:
        """The model to load: its own, or that of the policy."""
        return HFModelConfig(
            path=self.model.path or policy_path,
            trust_remote_code=self.model.trust_remote_code,
            external_lib=self.model.external_lib,
            override_config=self.model.override_config,
            dropout=self.model.dropout,
            use_remove_padding=self.model.use_remove_padding,
            require_remove_padding=self.model.require_remove_padding,
            enable_gradient_checkpointing=self.model.enable_gradient_checkpointing,
        )
