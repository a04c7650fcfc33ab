from __future__ import annotations

import pytest
import torch

from verl.workers.losses import LossTotals, compute_value_loss

RETURNS = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 50.0]])
VALUES = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
VPREDS = torch.tensor([[0.5, 1.0, -0.5], [0.0, 1.0, 1.0]], requires_grad=True)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def loss(rows=slice(None), mode="token-mean"):
    return compute_value_loss(
        VPREDS[rows],
        RETURNS[rows],
        VALUES[rows],
        MASK[rows],
        cliprange_value=0.25,
        loss_agg_mode=mode,
        totals=LossTotals.of(MASK),
    )


def test_the_worse_of_the_value_and_the_value_kept_near_the_old_one_counts():
    # Squared errors of the values: 1/4, 0, 9/4; 0, 1. Kept near: 9/16, 9/16, 25/16; 9/16, 1.
    worse = [9 / 16, 9 / 16, 9 / 4, 9 / 16, 1.0]
    found, metrics = loss()
    assert found.item() == pytest.approx(0.5 * sum(worse) / 5)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(3 / 5)
    assert metrics["critic/vpred_mean"] == pytest.approx((0.5 + 1.0 - 0.5 + 0.0 + 1.0) / 5)
    (gradient,) = torch.autograd.grad(found, VPREDS)
    assert (gradient != 0).tolist() == [[False, False, True], [False, True, False]]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_shares_of_micro_batches_add_up(mode):
    whole, metrics = loss(mode=mode)
    first, second = loss(slice(0, 1), mode), loss(slice(1, 2), mode)
    torch.testing.assert_close(first[0] + second[0], whole)
    for name, value in metrics.items():
        assert first[1][name] + second[1][name] == pytest.approx(value)


def test_by_verls_names_a_batch_is_a_mini_batch_of_its_own():
    named = {"vpreds": VPREDS, "returns": RETURNS, "values": VALUES, "response_mask": MASK, "cliprange_value": 0.25}
    found, expected = compute_value_loss(**named), loss()
    assert found[0].item() == expected[0].item()
    assert found[1] == expected[1]
