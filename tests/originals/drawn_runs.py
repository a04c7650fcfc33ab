"""Options of whole runs drawn at random, by verl's names, of those that mean the same on both sides."""

from __future__ import annotations

from random import Random
from typing import Any

from verl.workers.config.actor import LOSS_AGG_MODES

ACTOR, CRITIC, CORRECTION = "actor_rollout_ref.actor", "critic", "algorithm.rollout_correction"
ESTIMATORS = (
    *("gae", "grpo", "grpo_passk", "grpo_vectorized", "gpg", "rloo", "rloo_vectorized", "opo"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline"),
)
LOSSES = ("vanilla", "gspo", "gpg", "sapo", "cispo", "dppo_tv", "dppo_kl", "dro")
DIVERGENCES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

Options = dict[str, Any]


def run(seed: int) -> Options:
    """Every third is PPO with a critic. The losses that choose tokens of a micro-batch (kl_cov, clip_cov) are left out:
    which sequences share one is not the same."""
    draw = Random(seed)
    estimator = "gae" if seed % 3 == 0 else draw.choice(ESTIMATORS[1:])
    options: Options = {
        "algorithm.adv_estimator": estimator,
        "algorithm.gamma": draw.choice((0.0, 1.0, draw.random())),
        "algorithm.lam": draw.choice((0.0, 1.0, draw.random())),
        "actor_rollout_ref.rollout.temperature": draw.choice((1.0, draw.uniform(0.3, 1.5))),
        f"{ACTOR}.calculate_sum_pi_squared": estimator == "optimal_token_baseline",
    }
    if estimator in ("grpo", "grpo_passk"):
        options["algorithm.norm_adv_by_std_in_grpo"] = draw.random() < 0.5
    if draw.random() < 0.5:
        options |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": draw.choice(DIVERGENCES)}
        options["algorithm.kl_ctrl.kl_coef"] = draw.uniform(0.001, 0.5)
        options["algorithm.kl_ctrl.type"] = draw.choice(("fixed", "adaptive"))
        options["algorithm.kl_ctrl.horizon"] = draw.choice((10, 1000))
        options["algorithm.kl_ctrl.target_kl"] = draw.uniform(0.0001, 0.1)
    options |= _of_actor(draw) | _of_role(draw, ACTOR)
    if estimator == "gae":
        options |= _of_role(draw, CRITIC) | {f"{CRITIC}.cliprange_value": draw.uniform(0.001, 1.0)}
    if draw.random() < 0.5:
        options[f"{CORRECTION}.rollout_is"] = draw.choice(("token", "sequence"))
        options[f"{CORRECTION}.rollout_is_threshold"] = draw.choice((1.2, 2.0))
        options[f"{CORRECTION}.rollout_is_batch_normalize"] = draw.random() < 0.5
    return options


def _of_actor(draw: Random) -> Options:
    options: Options = {
        "policy_loss.loss_mode": draw.choice(LOSSES),
        "policy_loss.dro_beta": draw.uniform(0.1, 1.0),
        "clip_ratio_low": draw.uniform(0.001, 0.3),
        "clip_ratio_high": draw.uniform(0.001, 0.3),
        "clip_ratio_c": draw.uniform(1.01, 6.0),
        "tau_pos": draw.uniform(0.1, 3.0),
        "tau_neg": draw.uniform(0.1, 3.0),
        "entropy_coeff": draw.choice((0.0, draw.uniform(0.0, 0.1))),
        "use_kl_loss": draw.random() < 0.7,
        "kl_loss_type": draw.choice(DIVERGENCES) + draw.choice(("", "+")),
        "kl_loss_coef": draw.uniform(0.0, 1.0),
    }
    return {f"{ACTOR}.{name}": value for name, value in options.items()}


def _of_role(draw: Random, role: str) -> Options:
    """How a mini-batch is cut and its loss aggregated, and the optimizer.

    Nothing is set to null, with which a key of our critic follows the actor's, and verl's does not.
    """
    options: Options = {
        "ppo_mini_batch_size": draw.choice((1, 2, 4)),
        "ppo_epochs": draw.choice((1, 1, 2)),
        "loss_agg_mode": draw.choice(LOSS_AGG_MODES),
        "loss_scale_factor": draw.choice((None, 3, 100)),
        "optim.betas": [draw.uniform(0.5, 0.95), draw.uniform(0.8, 0.999)],
        "optim.weight_decay": draw.choice((0.0, 0.1, 10.0)),
        "optim.clip_grad": draw.uniform(0.001, 1.0),
        "optim.total_training_steps": draw.choice((4, 8)),
        **draw.choice(({"optim.lr_warmup_steps": draw.choice((0, 0, 0, 1))}, {"optim.lr_warmup_steps_ratio": 0.5})),
        **draw.choice(({"ppo_micro_batch_size_per_gpu": draw.choice((1, 2))}, {"use_dynamic_bsz": True})),
    }
    if "use_dynamic_bsz" in options:
        options["ppo_max_token_len_per_gpu"] = draw.choice((13, 20, 40))
    if draw.random() < 0.5:
        options |= {"optim.lr_scheduler_type": "cosine", "optim.min_lr_ratio": draw.choice((0.0, draw.random()))}
        options |= {"optim.num_cycles": draw.choice((0.5, 1.0)), "optim.zero_indexed_step": draw.random() < 0.5}
    return {f"{role}.{name}": value for name, value in options.items() if value is not None}
