"""Typed configuration: every key that a run understands, with its default and meaning."""

from verl.workers.config.actor import ActorConfig, CheckpointConfig, FSDPConfig, RefConfig
from verl.workers.config.algorithm import (
    AlgorithmConfig,
    CustomRewardFunctionConfig,
    KLControlConfig,
    RewardModelConfig,
    RolloutCorrectionConfig,
)
from verl.workers.config.critic import CriticConfig
from verl.workers.config.data import DataConfig
from verl.workers.config.distillation import DistillationConfig, DistillationLossConfig
from verl.workers.config.megatron import MegatronConfig, RefMegatronConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.optim import OptimizerConfig
from verl.workers.config.rollout import RolloutConfig, SamplingConfig
from verl.workers.config.trainer import ActorRolloutRefConfig, PPOConfig, RayConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "DistillationConfig",
    "DistillationLossConfig",
    "FSDPConfig",
    "HFModelConfig",
    "KLControlConfig",
    "MegatronConfig",
    "OptimizerConfig",
    "PPOConfig",
    "RayConfig",
    "RefConfig",
    "RefMegatronConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SamplingConfig",
    "TrainerConfig",
]
