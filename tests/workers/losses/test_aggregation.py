from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.config import ConfigError
from verl.workers.config import ActorConfig
from verl.workers.losses import LossTotals, agg_loss, compute_policy_loss_vanilla

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 3 / 2),
    ],
)
def test_each_mode_on_a_small_table(mode, expected):
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "told", "expected"),
    [
        ("token-mean", {"batch_num_tokens": 40}, 10 / 40),
        ("token-mean", {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 7}, 2 * 10 / 40),
        ("seq-mean-token-sum", {"dp_size": 2, "global_batch_size": 8}, 2 * (6 + 4) / 8),
        ("seq-mean-token-mean", {"global_batch_size": 8}, (2 + 4) / 8),
        ("seq-mean-token-sum-norm", {"global_batch_size": 8, "loss_scale_factor": 5}, (6 + 4) / 5 / 8),
        ("token-mean", ActorConfig().global_batch_info, 10 / 4),
        ("token-mean", dict.fromkeys(("batch_num_tokens", "global_batch_size", "loss_scale_factor")), 10 / 4),
    ],
)
def test_what_a_loss_of_verls_says_of_the_mini_batch_counts(mode, told, expected):
    assert agg_loss(loss_mat=LOSS, loss_mask=MASK, loss_agg_mode=mode, **told).item() == pytest.approx(expected)


def test_totals_count_tokens_and_sequences_that_have_any():
    assert LossTotals.of(MASK) == LossTotals(num_tokens=4, num_sequences=2)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_without_tokens_gives_zero_and_no_gradient(mode):
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    total = agg_loss(loss, torch.zeros(2, 3), mode)
    total.backward()
    assert total.item() == 0
    assert not loss.grad.any()


def test_an_unknown_mode_is_named_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match="Did you mean 'token-mean'"):
        agg_loss(LOSS, MASK, "token-men")


@st.composite
def cut_mini_batches(draw):
    """A seed, the number of tokens of each sequence, and the micro-batch each one goes to."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    num_parts = draw(st.integers(1, 5))
    parts = draw(st.lists(st.integers(0, num_parts - 1), min_size=len(lengths), max_size=len(lengths)))
    return draw(st.integers(0, 1000)), lengths, parts


def pieces(parts):
    return [[i for i, part in enumerate(parts) if part == wanted] for wanted in set(parts)]


@settings(deadline=None)
@given(cut=cut_mini_batches(), mode=st.sampled_from(MODES))
def test_any_way_to_cut_the_mini_batch_gives_the_same_loss_and_gradient(cut, mode):
    seed, lengths, parts = cut
    loss = torch.randn(len(lengths), 5, generator=torch.manual_seed(seed), dtype=torch.float64)
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    whole = loss.clone().requires_grad_()
    cut_up = loss.clone().requires_grad_()
    agg_loss(whole, mask, mode).backward()
    totals = reduce(LossTotals.__add__, (LossTotals.of(mask[rows]) for rows in pieces(parts)))
    shares = [agg_loss(cut_up[rows], mask[rows], mode, totals=totals) for rows in pieces(parts)]
    sum(shares).backward()
    assert sum(share.item() for share in shares) == pytest.approx(agg_loss(loss, mask, mode).item(), abs=1e-12)
    torch.testing.assert_close(cut_up.grad, whole.grad)


@settings(deadline=None)
@given(cut=cut_mini_batches(), mode=st.sampled_from(MODES))
def test_any_way_to_cut_the_mini_batch_gives_the_same_policy_loss_and_metrics(cut, mode):
    seed, lengths, parts = cut
    generator = torch.manual_seed(seed)
    old, new, advantages = (torch.randn(len(lengths), 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    config = ActorConfig(loss_agg_mode=mode)
    loss, metrics = compute_policy_loss_vanilla(old, new, advantages, mask, config.loss_agg_mode, config)
    totals = LossTotals.of(mask)
    shares = [
        compute_policy_loss_vanilla(old[rows], new[rows], advantages[rows], mask[rows], mode, config, totals=totals)
        for rows in pieces(parts)
    ]
    assert sum(share.item() for share, _ in shares) == pytest.approx(loss.item(), abs=1e-9)
    for name, value in metrics.items():
        assert sum(share[name] for _, share in shares) == pytest.approx(value, abs=1e-6)
