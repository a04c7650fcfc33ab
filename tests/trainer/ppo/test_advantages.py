import numpy as np
import pytest
import torch

from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.utils.config import ConfigError
from verl.workers.config import AlgorithmConfig


def uids(*names):
    return np.array(names, dtype=object)


def outcome(*scores, num_tokens=3):
    """Rewards [B, R] that stand on the last token."""
    rewards = torch.zeros(len(scores), num_tokens)
    rewards[:, -1] = torch.tensor(scores)
    return rewards


def estimated(name, rewards, mask, index, values=None, **options):
    """As the trainer calls estimators."""
    critic = {} if values is None else {"values": values}
    return get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, index=index, config=AlgorithmConfig(**options), **critic
    )


def first_column(name, scores, index, **options):
    rewards = outcome(*scores)
    advantages, returns = estimated(name, rewards, torch.ones_like(rewards, dtype=torch.int64), index, **options)
    assert advantages.dtype == returns.dtype == torch.float32
    assert torch.equal(advantages, advantages[:, :1].expand_as(advantages))
    assert torch.equal(returns, advantages)
    return advantages[:, 0].tolist()


def test_grpo_centres_each_group_and_divides_by_its_sample_standard_deviation():
    # Group a: 1, 2, 3 (mean 2, std 1). Group b: 0, 4 (mean 2, std sqrt(8)). Interleaved on purpose.
    got = first_column("grpo", [1.0, 0.0, 2.0, 4.0, 3.0], uids("a", "b", "a", "b", "a"))
    assert got == pytest.approx([-1.0, -2 / 8**0.5, 0.0, 2 / 8**0.5, 1.0], abs=1e-5)


def test_grpo_without_division_by_std_only_centres():
    got = first_column("grpo", [1.0, 0.0, 2.0, 4.0, 3.0], uids("a", "b", "a", "b", "a"), norm_adv_by_std_in_grpo=False)
    assert got == pytest.approx([-1.0, -2.0, 0.0, 2.0, 1.0])


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_equal_rewards_in_a_group_carry_no_advantage(name):
    assert first_column(name, [0.1, 0.1, 0.1], uids("a", "a", "a")) == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_of_one_has_its_score_as_advantage(name):
    assert first_column(name, [0.7, 1.0, 3.0], uids("alone", "b", "b"))[0] == pytest.approx(0.7)


def test_rloo_subtracts_the_mean_of_the_other_responses():
    # 1 - (2+6)/2 = -3; 2 - (1+6)/2 = -1.5; 6 - (1+2)/2 = 4.5
    assert first_column("rloo", [1.0, 2.0, 6.0], uids("a", "a", "a")) == pytest.approx([-3.0, -1.5, 4.5])


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_the_score_is_the_sum_of_token_rewards_and_padding_gets_no_advantage(name):
    rewards = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 3.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    advantages, _ = estimated(name, rewards, mask, uids("a", "a"))
    expected = {"grpo": 2**-0.5, "rloo": 2.0}[name]
    table = torch.tensor([[-expected, -expected, 0.0], [expected, 0.0, expected]])
    torch.testing.assert_close(advantages, table, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_sequence_without_tokens_does_not_move_the_baseline_of_its_group(name):
    rewards = outcome(1.0, 2.0, -100.0)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0]])
    advantages, _ = estimated(name, rewards, mask, uids("a", "a", "a"))
    alone, _ = estimated(name, rewards[:2], mask[:2], uids("a", "a"))
    torch.testing.assert_close(advantages[:2], alone)
    assert not advantages[2].any()


def test_reinforce_plus_plus_discounts_and_whitens_over_the_tokens_of_the_batch():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages, returns = estimated("reinforce_plus_plus", rewards, mask, uids("a", "b"), gamma=0.5)
    torch.testing.assert_close(returns, torch.tensor([[0.25, 0.5, 1.0], [1.0, 2.0, 0.0]]))
    tokens = np.array([0.25, 0.5, 1.0, 1.0, 2.0])
    white = (tokens - tokens.mean()) / tokens.std(ddof=1)
    assert advantages[mask.bool()].tolist() == pytest.approx(white.tolist(), abs=1e-5)
    assert advantages[1, 2] == 0


def test_reinforce_plus_plus_passes_the_return_through_tool_output_undiscounted():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 0, 0, 1]])
    _, returns = estimated("reinforce_plus_plus", rewards, mask, uids("a"), gamma=0.5)
    assert returns.tolist() == [[0.5, 0.0, 0.0, 1.0]]


def test_an_unknown_estimator_is_named_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator='rlo'.*Did you mean 'rloo'"):
        get_adv_estimator_fn("rlo")


def test_a_name_belongs_to_one_function():
    with pytest.raises(ValueError, match="already registered by verl.trainer.ppo.advantages"):

        @register_adv_est("grpo")
        def mine(token_level_rewards, response_mask, index, config):
            return token_level_rewards, token_level_rewards


def test_group_ids_must_match_the_sequences():
    with pytest.raises(ValueError, match="1 group ids for 2 sequences"):
        first_column("grpo", [1.0, 2.0], uids("a"))


def gae(rewards, values, mask, **options):
    rewards, values = torch.tensor(rewards), torch.tensor(values)
    return estimated("gae", rewards, torch.tensor(mask), uids(*range(len(rewards))), values, **options)


REWARDS = [[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]]
VALUES = [[0.5, 0.25, 0.5], [1.0, 1.0, 9.0]]
MASK = [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages"),
    [
        # Surprises r + gamma * V' - V of the first row: 0 + 0.25 - 0.5, 0 + 0.5 - 0.25, 1 - 0.5; of the second: 0, 1.
        (1.0, 0.0, [[-0.25, 0.25, 0.5], [0.0, 1.0, 0.0]]),
        (1.0, 1.0, [[0.5, 0.75, 0.5], [1.0, 1.0, 0.0]]),
        # -0.25 + 0.5 * (0.25 + 0.5 * 0.5), 0.25 + 0.5 * 0.5, 0.5; 0 + 0.5 * 1, 1.
        (1.0, 0.5, [[0.0, 0.5, 0.5], [0.5, 1.0, 0.0]]),
        # Surprises -0.375, 0, 0.5; -0.5, 1. Then each the next but a quarter of it.
        (0.5, 0.5, [[-0.34375, 0.125, 0.5], [-0.25, 1.0, 0.0]]),
    ],
)
def test_gae_follows_its_recursion_within_each_sequence(gamma, lam, advantages):
    whitened, returns = gae(REWARDS, VALUES, MASK, gamma=gamma, lam=lam)
    mask = torch.tensor(MASK).bool()
    expected = torch.tensor(advantages)
    torch.testing.assert_close(returns, torch.where(mask, expected + torch.tensor(VALUES), 0.0))
    counted = expected[mask]
    torch.testing.assert_close(whitened[mask], (counted - counted.mean()) / counted.std(), rtol=1e-4, atol=1e-5)
    assert (whitened[~mask] == 0).all()


def test_gae_passes_over_the_tokens_of_a_tool_and_keeps_the_reward_that_stands_on_one():
    turns, _ = gae([[0.0, 7.0, 0.0, 1.0]], [[0.5, 3.0, 0.25, 9.0]], [[1, 0, 1, 0]], gamma=0.5, lam=0.5)
    together, returns = gae([[7.0, 1.0]], [[0.5, 0.25]], [[1, 1]], gamma=0.5, lam=0.5)
    assert turns[0, [0, 2]].tolist() == pytest.approx(together[0].tolist())
    assert turns[0, [1, 3]].tolist() == [0.0, 0.0]
    assert returns[0].tolist() == pytest.approx([7.0 + 0.5 * 0.25 + 0.25 * 0.75, 1.0])


@pytest.mark.parametrize("member", ["GRPO", "GAE", "RLOO", "REINFORCE_PLUS_PLUS"])
def test_verls_enum_and_registry_name_the_same_estimators(member):
    name = AdvantageEstimator[member]
    assert get_adv_estimator_fn(name) is get_adv_estimator_fn(str(name)) is ADV_ESTIMATOR_REGISTRY[name]


def test_estimators_can_be_called_with_verls_arguments():
    rewards, mask = outcome(1.0, 3.0), torch.ones(2, 3)
    centred, _ = compute_grpo_outcome_advantage(rewards, mask, uids("a", "a"), norm_adv_by_std_in_grpo=False)
    assert centred[:, 0].tolist() == [-1.0, 1.0]
    _, returns = compute_gae_advantage_return(rewards, torch.zeros(2, 3), mask, gamma=0.5, lam=1.0)
    assert returns[0].tolist() == [0.25, 0.5, 1.0]
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, AlgorithmConfig(gamma=0.5))
    assert returns[0].tolist() == [0.25, 0.5, 1.0]
    advantages, _ = compute_remax_outcome_advantage(rewards, torch.tensor([0.5, 1.0]), mask)
    assert advantages[:, 0].tolist() == [0.5, 2.0]
    ahead, _ = compute_grpo_passk_outcome_advantage(rewards, mask, uids("a", "a"))
    assert ahead[:, 0].tolist() == pytest.approx([0.0, 2 / 2**0.5])


def test_an_estimator_reads_its_configuration_as_verls():
    @register_adv_est("reads_config")
    def mine(token_level_rewards, response_mask, index, config=None, **kwargs):
        assert (config.gamma, config["gamma"], config.get("gamma"), config.get("absent", 7)) == (0.5, 0.5, 0.5, 7)
        assert not kwargs
        return token_level_rewards, token_level_rewards

    assert estimated("reads_config", outcome(1.0), torch.ones(1, 3), uids("a"), gamma=0.5)[0][0, -1] == 1.0


@pytest.mark.parametrize(
    ("name", "mine"),
    [
        ("lacks_index", lambda token_level_rewards, response_mask, config: None),
        ("other_names", lambda rewards, mask, index, config: None),
        ("wants_more", lambda token_level_rewards, response_mask, index, config, values: None),
    ],
)
def test_an_estimator_with_another_signature_is_an_error_of_the_configuration(name, mine):
    register_adv_est(name)(mine)
    expected = rf"adv_estimator={name}: .*cannot take \(token_level_rewards, response_mask, index, config\) by name"
    with pytest.raises(ConfigError, match=expected):
        get_adv_estimator_fn(name)
