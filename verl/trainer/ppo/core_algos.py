"""The algorithms under the names that verl gives them, in one place to import from.

What trainer ranks compute lives in `verl.workers.losses`, which `verl.workers` imports directly; what the driver
computes lives next to this file.
"""

from verl.trainer.ppo.advantage_variants import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_opo_outcome_advantage,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from verl.trainer.ppo.advantages import (
    ADV_ESTIMATOR_REGISTRY,
    BASELINES,
    COMPONENTS,
    SUM_PI_SQUARED,
    AdvantageEstimator,
    EstimatorFunction,
    ValueEstimatorFunction,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    get_adv_estimator_fn,
    needed_by,
    needs_values,
    register_adv_est,
)
from verl.trainer.ppo.kl_control import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    get_kl_controller,
)
from verl.trainer.ppo.policy_filtration import compute_pf_ppo_reweight_data
from verl.trainer.ppo.rollout_correction import (
    compute_rollout_importance_weights,
    rejected,
    rollout_probs_diff_metrics,
)
from verl.trainer.ppo.verl_names import refused
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.actor_loss import compute_policy_loss_bypass_mode
from verl.workers.losses import (
    POLICY_LOSS_REGISTRY,
    LossTotals,
    PolicyLoss,
    agg_loss,
    compute_entropy_loss,
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_kl_cov,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
    compute_value_loss,
    get_policy_loss_fn,
    kl_penalty,
    register_policy_loss,
)

__getattr__ = refused(__name__)
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
"""verl's two are the same formula."""

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "BASELINES",
    "COMPONENTS",
    "EstimatorFunction",
    "FixedKLController",
    "KLController",
    "LossTotals",
    "POLICY_LOSS_REGISTRY",
    "PolicyLoss",
    "SUM_PI_SQUARED",
    "ValueEstimatorFunction",
    "agg_loss",
    "apply_kl_penalty",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss_bypass_mode",
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
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_rollout_importance_weights",
    "compute_value_loss",
    "entropy_from_logits",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "logprobs_from_logits",
    "needed_by",
    "needs_values",
    "register_adv_est",
    "register_policy_loss",
    "rejected",
    "rollout_probs_diff_metrics",
]
