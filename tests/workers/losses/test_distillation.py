"""Losses of on-policy distillation against tables that were computed by hand."""

from math import exp, inf, log

import pytest
import torch

from verl.utils.config import ConfigError
from verl.workers.config import DistillationLossConfig
from verl.workers.losses.distillation import bounded, forward_kl_topk, reverse_kl

STUDENT, TEACHER = (-1.0, -2.0, -0.5), (-1.5, -0.5, -0.5)
"""Log-probs of three sampled tokens. The student's less the teacher's: 0.5, -1.5, 0."""


def loss(mode, **options):
    return DistillationLossConfig(loss_mode=mode, **options)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("k1", [0.5, -1.5, 0.0]),
        ("kl", [0.5, -1.5, 0.0]),
        ("abs", [0.5, 1.5, 0.0]),
        ("k2", [0.125, 1.125, 0.0]),
        ("mse", [0.125, 1.125, 0.0]),
        ("k3", [exp(-0.5) + 0.5 - 1.0, exp(1.5) - 1.5 - 1.0, 0.0]),
        ("low_var_kl", [0.1065306597, 1.9816890703, 0.0]),
    ],
)
def test_each_estimator_gives_the_numbers_of_the_table(mode, expected):
    config = loss(mode, use_policy_gradient=mode in ("k1", "kl"))
    found = reverse_kl(torch.tensor([STUDENT]), torch.tensor([TEACHER]), config)
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_losses_have_a_bound_and_log_probs_of_the_teachers_tokens_a_floor():
    student, teacher = torch.tensor([[-1.0, -30.0, -30.0]]), torch.tensor([[-40.0, -2.0, -50.0]])
    clamped = {"log_prob_min_clamp": -10.0, "loss_max_clamp": 7.5}
    config = loss("k1", use_policy_gradient=True, **clamped)
    found = reverse_kl(student, teacher, config)
    assert found.tolist() == [[39.0, -28.0, 20.0]]
    assert bounded(found, config).tolist() == [[7.5, -7.5, 7.5]]
    of_tokens = loss("forward_kl_topk", topk=1, **clamped)
    found = forward_kl_topk(torch.tensor([[[-30.0]]]), torch.tensor([[[-0.5]]]), of_tokens)
    assert found.item() == pytest.approx(exp(-0.5) * 9.5)


def test_the_forward_divergence_is_summed_over_the_teachers_tokens():
    p, q = torch.tensor([[[0.6, 0.3]]]), torch.tensor([[[0.25, 0.5]]])
    expected = 0.6 * log(0.6 / 0.25) + 0.3 * log(0.3 / 0.5)  # 0.372...
    assert forward_kl_topk(q.log(), p.log(), loss("forward_kl_topk", topk=2)).item() == pytest.approx(expected)
    assert expected == pytest.approx(0.3720335, abs=1e-6)


def test_with_all_tokens_it_is_the_divergence_and_its_gradient_that_of_cross_entropy():
    logits, teacher = torch.randn(2, 3, 7, requires_grad=True), torch.randn(2, 3, 7).log_softmax(-1)
    found = forward_kl_topk(logits.log_softmax(-1), teacher, loss("forward_kl_topk", topk=7))
    whole = torch.nn.functional.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found, whole)
    found.sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - teacher.exp())


def test_a_sum_below_0_is_0_and_teaches_nothing():
    q = torch.tensor([[[0.5, 0.4]]]).log().requires_grad_()
    found = forward_kl_topk(q, torch.tensor([[[0.3, 0.2]]]).log(), loss("forward_kl_topk", topk=2))
    found.sum().backward()
    assert (found.item(), q.grad.tolist()) == (0.0, [[[0.0, 0.0]]])


@pytest.mark.parametrize("floor", [None, -10.0])
def test_what_the_student_has_no_token_for_counts_nothing(floor):
    q = torch.tensor([[[0.25, 0.1]]]).log().requires_grad_()
    config = loss("forward_kl_topk", topk=2, log_prob_min_clamp=floor)
    found = forward_kl_topk(q, torch.tensor([[[log(0.6), -inf]]]), config)
    found.sum().backward()
    assert found.item() == pytest.approx(0.6 * log(0.6 / 0.25))
    assert q.grad.tolist() == [[[pytest.approx(-0.6), 0.0]]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_mode": "k1"}, "loss_mode=k1 has the same gradient with any teacher"),
        ({"loss_mode": "kl"}, "loss_mode=kl has the same gradient with any teacher"),
        ({"loss_mode": "forward_kl_topk", "use_policy_gradient": True}, "tokens that were not sampled"),
    ],
)
def test_what_cannot_teach_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        DistillationLossConfig(**options)
