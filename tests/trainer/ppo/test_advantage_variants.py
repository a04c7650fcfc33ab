"""Estimators of papers, against values that were computed by hand."""

import pytest
import torch

from tests.trainer.ppo.test_advantages import first_column, outcome, uids
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.experience import reward_components
from verl.workers.config import AlgorithmConfig
from verl.workers.reward_manager import RewardError, RewardOutput

SCORES = [1.0, 0.0, 2.0, 4.0, 3.0]
INDEX = uids("a", "b", "a", "b", "a")  # group a: 1, 2, 3; group b: 0, 4


def test_rloo_has_two_names():
    assert first_column("rloo_vectorized", SCORES, INDEX) == first_column("rloo", SCORES, INDEX)


def test_gpg_scales_by_the_share_of_sequences_that_earn_something():
    # Four of five have a score other than 0: the factor is 5 / 4.
    assert first_column("gpg", SCORES, INDEX) == pytest.approx([-1.25, -2.5, 0.0, 2.5, 1.25])


def test_gpg_of_a_batch_without_any_score_is_zero():
    assert first_column("gpg", [0.0, 0.0], uids("a", "a")) == [0.0, 0.0]


def test_reinforce_plus_plus_with_a_baseline_whitens_what_is_centred():
    # Centred: -1, -2, 0, 2, 1, three tokens each: mean 0, variance of the 15 tokens 30 / 14.
    scale = (14 / 30) ** 0.5
    expected = [-scale, -2 * scale, 0.0, 2 * scale, scale]
    assert first_column("reinforce_plus_plus_baseline", SCORES, INDEX) == pytest.approx(expected, abs=1e-4)


def test_opo_weighs_the_baseline_by_length():
    rewards = outcome(1.0, 4.0, 7.0)
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [1, 1, 1]])
    # Group a: lengths 3 and 1, scores 1 and 4: baseline (3 + 4) / 4. Group b has one member.
    advantages, _ = get_adv_estimator_fn("opo")(rewards, mask, uids("a", "a", "b"), AlgorithmConfig())
    assert advantages.tolist() == [[-0.75] * 3, [0.0, 0.0, 2.25], [7.0] * 3]


def test_pass_at_k_rewards_the_best_of_a_group_alone():
    got = first_column("grpo_passk", SCORES, INDEX, norm_adv_by_std_in_grpo=False)
    assert got == pytest.approx([0.0, 0.0, 0.0, 4.0, 1.0])
    got = first_column("grpo_passk", SCORES, INDEX)
    assert got == pytest.approx([0.0, 0.0, 0.0, 4 / 8**0.5, 1.0], abs=1e-5)


def test_of_several_that_are_best_none_is_ahead():
    assert first_column("grpo_passk", [1.0, 1.0, 5.0], uids("a", "a", "b")) == [0.0, 0.0, 0.0]


MASK = torch.tensor([[1, 1], [1, 0], [1, 1]])
REWARDS = torch.tensor([[0.0, 3.0], [1.0, 0.0], [0.5, 0.5]])
GROUPS = uids("a", "a", "b")


def test_remax_takes_off_what_a_greedy_response_earns():
    advantages, returns = get_adv_estimator_fn("remax")(
        token_level_rewards=REWARDS,
        response_mask=MASK,
        index=GROUPS,
        config=AlgorithmConfig(),
        reward_baselines=torch.tensor([2.0, 2.0, 0.25]),
    )
    assert returns.tolist() == [[3.0, 3.0], [1.0, 0.0], [1.0, 0.5]]
    assert advantages.tolist() == [[1.0, 1.0], [-1.0, 0.0], [0.75, 0.25]]


def test_the_optimal_token_baseline_weighs_by_energy_up_to_the_token():
    # 1 - 2 pi + sum pi^2: 1 - 1 + 0.5 = 0.5, then 1 - 0.5 + 0.25 = 0.75; 1 - 1.6 + 0.7 = 0.1.
    given = {
        "token_level_rewards": REWARDS,
        "response_mask": MASK,
        "index": GROUPS,
        "config": AlgorithmConfig(),
        "old_log_probs": torch.tensor([[0.5, 0.25], [0.8, 1.0], [0.5, 0.5]]).log(),
        "sum_pi_squared": torch.tensor([[0.5, 0.25], [0.7, 9.0], [0.5, 0.5]]),
    }
    advantages, returns = get_adv_estimator_fn("optimal_token_baseline")(**given)
    baseline = (0.5 * 3 + 0.1 * 1) / 0.6
    # Beyond the second longest response the longest has no baseline; group b has one member.
    expected = torch.tensor([[3 - baseline, 3.0], [1 - baseline, 0.0], [1.0, 0.5]])
    torch.testing.assert_close(advantages, expected)
    weights = torch.tensor([[1.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    weighed, _ = get_adv_estimator_fn("optimal_token_baseline")(**given, rollout_is_weights=weights)
    baseline = (0.5 * 3 + 0.4 * 1) / 0.9
    torch.testing.assert_close(weighed[:, 0], torch.tensor([3 - baseline, 1 - baseline, 1.0]))

    columns = torch.tensor([[0, 2], [1, 3], [2, 3]])  # outputs of tools lie between

    def apart(values, between):
        return torch.full((3, 4), between, dtype=values.dtype).scatter(1, columns, values)

    spread = {
        name: apart(values, 0 if name in ("response_mask", "token_level_rewards") else 0.3)
        for name, values in {**given, "rollout_is_weights": weights}.items()
        if isinstance(values, torch.Tensor)
    }
    found = get_adv_estimator_fn("tir_optimal_token_baseline")(**given | spread)
    torch.testing.assert_close(found[0], apart(weighed, 0.0))
    torch.testing.assert_close(found[1].gather(1, columns)[MASK.bool()], returns[MASK.bool()])


@pytest.mark.parametrize("wrong", [None, "high", float("nan"), float("inf")])
def test_the_components_of_gdpo_are_finite_numbers_of_every_response(wrong):
    numbers = {"right": [1, 0.5], "short": [True, 3]}
    reward = RewardOutput(reward_tensor=torch.zeros(2, 1), responses=["x"] * 2, extra_info=numbers)
    assert reward_components(reward, ["short", "right"]).tolist() == [[1, 1], [3, 0.5]]
    numbers["short"][1] = wrong
    with pytest.raises(RewardError, match=f"short={wrong!r} for sample 1"):
        reward_components(reward, ["right", "short"])
    with pytest.raises(RewardError, match="other=None for sample 0"):
        reward_components(reward, ["other"])


def test_gdpo_normalises_each_component_before_it_adds_them():
    config = AlgorithmConfig(gdpo_reward_keys=["right", "short"], gdpo_reward_weights=[1.0, 0.5])
    advantages, _ = get_adv_estimator_fn("gdpo")(
        token_level_rewards=torch.zeros(4, 1),
        response_mask=torch.ones(4, 1),
        index=uids("a", "a", "b", "b"),
        config=config,
        reward_components=torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 7.0], [1.0, 7.0]]),
    )
    # Group a: +- 1 / sqrt 2 of each, so +- 0.5 / sqrt 2 in sum; group b: 0. Variance over 4 tokens: 0.25 / 3.
    unit = 0.5 / 2**0.5 / (0.25 / 3) ** 0.5
    torch.testing.assert_close(advantages.flatten(), torch.tensor([unit, -unit, 0.0, 0.0]), atol=1e-4, rtol=0)
