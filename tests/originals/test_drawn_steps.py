"""Steps of whole runs with drawn options against PyPI's verl, and with keys that its own loop does not obey."""

from __future__ import annotations

import json
from math import isclose
from typing import Any

import pytest

from tests.originals.drawn_runs import ACTOR, run
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
DROPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "`norm_adv_by_std_in_grpo=false` of grpo_vectorized": (GRPO, {"algorithm.norm_adv_by_std_in_grpo": False}),
    "`use_pf_ppo` without a critic": (GRPO, {"algorithm.use_pf_ppo": True}),
    "`trainer.critic_warmup`": (PPO, {"trainer.critic_warmup": 1}),
    "`actor.use_rollout_log_probs` of main_ppo": (PPO, {f"{ACTOR}.use_rollout_log_probs": True}),
}
"""Difference -> (options, key with a value that verl's loop treats like its default)."""
OF_SEVERAL = ("actor/ppo_kl", "actor/pg_clipfrac", "critic/vpred_mean", "critic/vf_clipfrac")
"""Means over micro-batches in verl."""

Steps = list[dict[str, float]]


def with_keys(options: dict[str, Any]) -> dict[str, Any]:
    return options | {name: value for of, keys in DROPPED.values() if of is options for name, value in keys.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Steps, Steps]]:
    """(verl's, ours): by seed; and by estimator, of verl with the keys of `DROPPED`, of us without any."""
    policy, critic = (tmp_path_factory.mktemp(name) for name in ("policy", "critic"))
    write_models(policy, critic)
    of_verl = {seed: run(seed) for seed in SEEDS} | {"grpo": with_keys(GRPO), "gae": with_keys(PPO)}
    of_ours = of_verl | {"grpo": GRPO, "gae": PPO}
    batches = [[batch(0), batch(1)]] * len(SEEDS) + [[batch(2)]] * 2
    given = {"policy": str(policy), "critic": str(critic), "batches": batches}
    verls = computed("take_steps.py", given | {"runs": [SHARED | each for each in of_verl.values()]}, VERL)
    options = [[f"{key}={json.dumps(value)}" for key, value in (SHARED | each).items()] for each in of_ours.values()]
    ours = computed("take_our_steps.py", given | {"runs": options}, OURS)
    return dict(zip(of_verl, zip(verls, ours, strict=True), strict=True))


def differing(verls: dict[str, float], ours: dict[str, float]) -> dict[str, Any]:
    """Of metrics that both have."""
    pairs = {name: (verls[name], ours[name]) for name in shared(verls, ours) if not name.startswith(OF_SEVERAL)}
    assert len(pairs) > 45
    return {name: pair for name, pair in pairs.items() if not isclose(*pair, rel_tol=3e-3, abs_tol=1e-4)}


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_with_drawn_options_are_verls(both: dict[Any, tuple[Steps, Steps]], seed: int) -> None:
    for verls, ours in zip(*both[seed], strict=True):
        assert differing(verls, ours) == {}, run(seed)


@pytest.mark.parametrize("name", DROPPED)
def test_a_key_that_verls_loop_does_not_obey_is_listed(both: dict[Any, tuple[Steps, Steps]], name: str) -> None:
    """With it verl's step is ours without it."""
    assert differences()[name]["why"]
    [verls], [ours] = both["gae" if DROPPED[name][0] is PPO else "grpo"]
    assert "actor/grad_norm" in shared(verls, ours)
    assert differing(verls, ours) == {}
