"""Losses of trainer ranks: policy losses, KL estimates, and the aggregation of token losses."""

from verl.workers.losses.aggregation import LossTotals, agg_loss, within_mini_batch
from verl.workers.losses.entropy import compute_entropy_loss
from verl.workers.losses.kl import kl_penalty
from verl.workers.losses.policy import (
    POLICY_LOSS_REGISTRY,
    PolicyLoss,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl.workers.losses.trust_regions import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_kl_cov,
)
from verl.workers.losses.value import compute_value_loss
from verl.workers.losses.variants import (
    compute_policy_loss_cispo,
    compute_policy_loss_dro,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
)

__all__ = [
    "POLICY_LOSS_REGISTRY",
    "LossTotals",
    "PolicyLoss",
    "agg_loss",
    "compute_entropy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_policy_loss",
    "within_mini_batch",
]
