"""The `actor_rollout_ref.actor` and `actor_rollout_ref.ref` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.utils.config import ConfigError, Section, option, section
from verl.workers.config.megatron import MegatronConfig, RefMegatronConfig
from verl.workers.config.optim import OptimizerConfig
from verl.workers.config.profiler import ProfilerConfig

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_LOSSES = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass(frozen=True, kw_only=True)
class FSDPConfig(Section):
    """How torch FSDP shards and computes."""

    param_offload: bool = option(False, "keep parameters in host memory between steps (accelerators)")
    optimizer_offload: bool = option(False, "keep optimizer state in host memory between steps (accelerators)")
    reshard_after_forward: bool = option(True, "free gathered parameters after the forward pass")
    fsdp_size: int = option(-1, "ranks per shard group; -1: all ranks", least=-1)
    model_dtype: str = option("fp32", "dtype of the sharded parameters", choices=("fp32", "bf16", "fp16"))
    dtype: str = option("bfloat16", "dtype of the computation", choices=("float32", "bfloat16", "float16"))
    forward_prefetch: bool = option(False, "gather the next layer's parameters during this layer's forward")
    ulysses_sequence_parallel_size: int = option(
        1,
        "ranks that compute each sequence together, every one a part of its tokens and in attention a part of the "
        "heads; null: 1, and for the reference policy the actor's",
        least=1,
        follows=True,
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Section):
    """Which policy loss."""

    loss_mode: str = option(
        "vanilla",
        "vanilla, gspo, geo_mean, gpg, sapo, cispo, clip_cov, kl_cov, dppo_tv, dppo_kl, dro, or a name registered with "
        "register_policy_loss",
    )
    tau_pos: float = option(1.0, "sapo: temperature of the gate for positive advantages", above=0)
    tau_neg: float = option(1.05, "sapo: temperature of the gate for the others", above=0)
    clip_cov_ratio: float = option(0.0002, "clip_cov: share of tokens that are not learned from", above=0, most=1)
    clip_cov_lb: float = option(1.0, "clip_cov: they are drawn from those whose covariance is above this")
    clip_cov_ub: float = option(5.0, "clip_cov: and below this")
    kl_cov_ratio: float = option(0.0002, "kl_cov: share of tokens that get a KL penalty", above=0, most=1)
    ppo_kl_coef: float = option(0.1, "kl_cov: weight of that penalty", least=0)
    dro_beta: float | None = option(None, "dro: weight of the squared log-ratio", above=0)

    def __post_init__(self) -> None:
        if self.loss_mode == "dro" and self.dro_beta is None:
            raise ConfigError(
                "policy_loss.loss_mode=dro needs policy_loss.dro_beta, the weight of the squared log-ratio"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """What a training checkpoint holds."""

    save_contents: list[str] = option(["model", "optimizer", "extra"], f"any of {', '.join(CHECKPOINT_CONTENTS)}")
    load_contents: list[str] = option(["model", "optimizer", "extra"], f"any of {', '.join(CHECKPOINT_CONTENTS)}")
    async_save: bool = option(
        False, "write model, optimizer and extra while training continues, from a copy in host memory"
    )

    def __post_init__(self) -> None:
        for key in ("save_contents", "load_contents"):
            if unknown := sorted(set(getattr(self, key)) - set(CHECKPOINT_CONTENTS)):
                raise ConfigError(f"checkpoint.{key}: unknown {unknown}; known: {', '.join(CHECKPOINT_CONTENTS)}")


@dataclass(frozen=True, kw_only=True)
class ActorConfig(Section):
    """Training of the policy."""

    strategy: str = option("fsdp2", "training engine: fsdp2, fsdp, megatron, or a registered one (verl: fsdp)")
    ppo_mini_batch_size: int = option(
        64,
        "prompts per optimizer step, each with rollout.n responses; null: 64 with a built-in model and built-in data, "
        "else verl's 256",
        least=1,
        follows=True,
    )
    ppo_micro_batch_size_per_gpu: int | None = option(
        None, "sequences per forward pass and rank; null: use_dynamic_bsz", least=1
    )
    use_dynamic_bsz: bool = option(
        True,
        "pack micro-batches up to ppo_max_token_len_per_gpu tokens; null: without ppo_micro_batch_size_per_gpu "
        "(verl: false)",
        follows=True,
    )
    ppo_max_token_len_per_gpu: int = option(16384, "token budget of one micro-batch and rank", least=1)
    ppo_epochs: int = option(1, "passes over each batch", least=1)
    shuffle: bool = option(False, "shuffle sequences between passes")
    clip_ratio: float = option(0.2, "PPO clip range; clip_ratio_low and clip_ratio_high override it", least=0)
    clip_ratio_low: float | None = option(None, "lower clip range; null: clip_ratio", least=0)
    clip_ratio_high: float | None = option(None, "upper clip range; null: clip_ratio", least=0)
    clip_ratio_c: float = option(3.0, "dual-clip bound for negative advantages", above=1)
    loss_agg_mode: str = option(
        "token-mean",
        "how token losses become one number",
        choices=LOSS_AGG_MODES,
    )
    loss_scale_factor: float | None = option(
        None, "what seq-mean-token-sum-norm divides by; null: the longest possible response", above=0
    )
    entropy_coeff: float = option(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = option(False, "report actor/entropy_loss without a bonus, too")
    use_kl_loss: bool = option(False, "add a KL penalty against the reference policy to the loss")
    kl_loss_coef: float = option(0.001, "weight of that penalty", least=0)
    kl_loss_type: str = option("low_var_kl", "KL estimator; with + its gradient is that of mse", choices=KL_LOSSES)
    grad_clip: float = option(1.0, "largest gradient norm", above=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    use_rollout_log_probs: bool = option(False, "take the rollout engine's log-probs as old log-probs")
    optim: OptimizerConfig = section(OptimizerConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)
    data_loader_seed: int = option(42, "seed of actor.shuffle", least=0, below=2**32)

    def __post_init__(self) -> None:
        if not self.use_dynamic_bsz and not self.ppo_micro_batch_size_per_gpu:
            raise ConfigError("actor.ppo_micro_batch_size_per_gpu must be set when actor.use_dynamic_bsz=false")

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high) of the PPO clip."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high

    @property
    def global_batch_info(self) -> dict[str, Any]:
        """verl's losses hand it on to `agg_loss`, which here knows the mini-batch by itself."""
        return {}


@dataclass(frozen=True, kw_only=True)
class RefConfig(Section):
    """The frozen reference policy; it shares the actor's ranks."""

    log_prob_micro_batch_size_per_gpu: int | None = option(None, "sequences per forward pass and rank", least=1)
    log_prob_use_dynamic_bsz: bool = option(
        True, "pack micro-batches up to log_prob_max_token_len_per_gpu tokens; null: as the actor", follows=True
    )
    log_prob_max_token_len_per_gpu: int = option(
        16384, "token budget of one micro-batch and rank; null: the actor's", least=1, follows=True
    )
    fsdp_config: FSDPConfig = section(FSDPConfig)
    megatron: RefMegatronConfig = section(RefMegatronConfig)
