import math

import pytest
import torch

from verl.utils import torch_functional as vf

VALUES = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])
MASK = torch.tensor([[1, 1], [1, 0]])


def test_masked_statistics_ignore_what_stands_outside_the_mask():
    assert vf.masked_sum(VALUES, MASK).item() == 9
    assert vf.masked_mean(VALUES, MASK).item() == 3
    assert vf.masked_mean(VALUES, MASK, axis=-1).tolist() == [1.5, 6.0]
    assert vf.masked_var(VALUES, MASK).item() == pytest.approx(7.0)


def test_masked_statistics_of_nothing_are_zero():
    nothing = torch.zeros_like(MASK)
    assert vf.masked_mean(VALUES, nothing).item() == vf.masked_var(VALUES, nothing).item() == 0
    assert not vf.masked_whiten(VALUES, nothing).any()


def test_whitening_gives_mean_zero_and_variance_one_or_keeps_the_mean():
    white = vf.masked_whiten(VALUES, MASK)
    assert white.tolist() == [pytest.approx([-2 / 7**0.5, -1 / 7**0.5]), pytest.approx([3 / 7**0.5, 0.0])]
    assert vf.masked_mean(vf.masked_whiten(VALUES, MASK, shift_mean=False), MASK).item() == pytest.approx(3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_numel", [1, 30, 1 << 24])
def test_logprobs_and_entropy_equal_the_definition_whatever_the_chunk(monkeypatch, dtype, chunk_numel):
    monkeypatch.setattr(vf, "CHUNK_NUMEL", chunk_numel)
    generator = torch.manual_seed(0)
    values = torch.randn(2, 5, 11, generator=generator).to(dtype)
    labels = torch.randint(11, (2, 5), generator=generator)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()

    log_probs = theirs.float().log_softmax(-1)
    expected = log_probs.gather(-1, labels[..., None])[..., 0]
    expected_entropy = torch.distributions.Categorical(logits=theirs.float()).entropy()
    got, entropy = vf.logprobs_from_logits(ours, labels), vf.entropy_from_logits(ours)

    assert got.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (got.sum() - 0.5 * entropy.sum()).backward()
    (expected.sum() - 0.5 * expected_entropy.sum()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-2 if dtype is torch.bfloat16 else 1e-6, rtol=1e-2)


def test_entropy_of_a_distribution_with_excluded_tokens_is_finite_and_so_is_its_gradient():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    entropy = vf.entropy_from_logits(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad.isfinite().all()


def test_no_rows_are_no_error():
    assert vf.logprobs_from_logits(torch.zeros(0, 3, 7), torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)
