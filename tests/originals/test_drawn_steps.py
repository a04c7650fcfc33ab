"""Steps of whole runs with drawn options against PyPI's verl, and with keys that its own loop does not obey."""

from __future__ import annotations

import json
from math import isclose
from typing import Any

import pytest

from tests.originals.drawn_runs import ACTOR, CORRECTION, run
from tests.originals.original import OURS, VERL, computed, differences
from tests.originals.test_whole_steps import batch, shared, write_models

SEEDS = (61, 69)
"""Whose first updates move the policy. By hand hundreds were compared: each costs 2 s."""
SHARED = {
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 2,
    "trainer.balance_batch": False,
    f"{ACTOR}.optim.lr": 1e-3,
    "critic.optim.lr": 1e-3,
}
GRPO = {"algorithm.adv_estimator": "grpo_vectorized", f"{ACTOR}.ppo_mini_batch_size": 4}
PPO = {"algorithm.adv_estimator": "gae", f"{ACTOR}.ppo_mini_batch_size": 4, "critic.ppo_mini_batch_size": 2}
REJECTING = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.75_1.5"}
BYPASS = GRPO | {f"{CORRECTION}.bypass_mode": True}
SEQUENCES = {
    **GRPO,
    "algorithm.adv_estimator": "grpo",
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ACTOR}.entropy_coeff": 0.1,
}
BASES = {"grpo": GRPO, "gae": PPO, "bypass": BYPASS, "sequences": SEQUENCES}
DROPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "`norm_adv_by_std_in_grpo=false` of grpo_vectorized": (GRPO, {"algorithm.norm_adv_by_std_in_grpo": False}),
    "`use_pf_ppo` without a critic": (GRPO, {"algorithm.use_pf_ppo": True}),
    "`trainer.critic_warmup`": (PPO, {"trainer.critic_warmup": 1}),
    "`actor.use_rollout_log_probs` of main_ppo": (PPO, {f"{ACTOR}.use_rollout_log_probs": True}),
    "`loss_type`, `rollout_is` and `rollout_rs` of bypass_mode in main_ppo": (
        BYPASS,
        {
            f"{CORRECTION}.{key}": value
            for key, value in {"loss_type": "reinforce", "rollout_is": "token", **REJECTING}.items()
        },
    ),
}
"""Difference -> (options, key with a value that verl's loop treats like its default)."""
OF_SEVERAL = ("actor/ppo_kl", "actor/pg_clipfrac", "critic/vpred_mean", "critic/vf_clipfrac")
"""Means over micro-batches in verl."""
OF_SAMPLES = ("critic/advantages/mean", "critic/returns/mean")
"""Of tokens that are not rejected, in verl."""

Steps = list[dict[str, float]]


def with_keys(options: dict[str, Any]) -> dict[str, Any]:
    return options | {name: value for of, keys in DROPPED.values() if of is options for name, value in keys.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Steps, Steps]]:
    """(verl's, ours): by seed; and by name of `BASES`, of verl with the keys of `DROPPED`, of us without any."""
    policy, critic = (tmp_path_factory.mktemp(name) for name in ("policy", "critic"))
    write_models(policy, critic)
    of_verl = {seed: run(seed) for seed in SEEDS} | {name: with_keys(options) for name, options in BASES.items()}
    of_ours = of_verl | BASES
    batches = [[batch(0), batch(1)]] * len(SEEDS) + [[batch(2)]] * 3 + [[batch(2, masked=range(4, 8))]]
    given = {"policy": str(policy), "critic": str(critic), "batches": batches}
    verls = computed("take_steps.py", given | {"runs": [SHARED | each for each in of_verl.values()]}, VERL)
    options = [[f"{key}={json.dumps(value)}" for key, value in (SHARED | each).items()] for each in of_ours.values()]
    ours = computed("take_our_steps.py", given | {"runs": options}, OURS)
    return dict(zip(of_verl, zip(verls, ours, strict=True), strict=True))


def differing(verls: dict[str, float], ours: dict[str, float]) -> dict[str, Any]:
    """Of metrics that both have."""
    pairs = {name: (verls[name], ours[name]) for name in shared(verls, ours) if not name.startswith(OF_SEVERAL)}
    assert len(pairs) > 30
    return {name: pair for name, pair in pairs.items() if not isclose(*pair, rel_tol=3e-3, abs_tol=1e-4)}


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_with_drawn_options_are_verls(both: dict[Any, tuple[Steps, Steps]], seed: int) -> None:
    for verls, ours in zip(*both[seed], strict=True):
        assert differing(verls, ours) == {}, run(seed)


@pytest.mark.parametrize("name", DROPPED)
def test_a_key_that_verls_loop_does_not_obey_is_listed(both: dict[Any, tuple[Steps, Steps]], name: str) -> None:
    """With it verl's step is ours without it."""
    assert differences()[name]["why"]
    [verls], [ours] = both[next(base for base, options in BASES.items() if options is DROPPED[name][0])]
    assert "actor/grad_norm" in shared(verls, ours)
    assert {key for key in differing(verls, ours) if not key.startswith(OF_SAMPLES)} == set()


def test_a_mean_over_sequences_counts_those_without_a_token_of_the_policy(both: dict[Any, tuple[Steps, Steps]]) -> None:
    """Half of the batch."""
    [verls], [ours] = both["sequences"]
    for name in ("actor/loss", "actor/entropy_loss", "actor/grad_norm"):
        assert ours[name] == pytest.approx(verls[name], 1e-3)
