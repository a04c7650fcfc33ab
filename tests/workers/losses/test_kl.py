import math

import pytest
import torch

from verl.utils.config import ConfigError
from verl.workers.losses import kl_penalty


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl", [-0.5, 0.0, 2.0]),
        ("abs", [0.5, 0.0, 2.0]),
        ("mse", [0.125, 0.0, 2.0]),
        ("low_var_kl", [math.exp(0.5) - 0.5 - 1, 0.0, math.exp(-2.0) + 2.0 - 1]),
    ],
)
def test_each_estimator_on_a_small_table(name, expected):
    got = kl_penalty(torch.tensor([-1.5, -1.0, -1.0]), torch.tensor([-1.0, -1.0, -3.0]), name)
    assert got.tolist() == pytest.approx(expected)


def test_low_var_kl_stays_finite_and_bounded_for_a_forgotten_token():
    logprob = torch.tensor([-1000.0, -0.1], requires_grad=True)
    got = kl_penalty(logprob, torch.tensor([-0.1, -1000.0]), "low_var_kl")
    got.sum().backward()
    assert got.tolist() == [10.0, 10.0]
    assert logprob.grad.isfinite().all()


def test_low_var_kl_and_kl_estimate_the_same_divergence():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = (policy * (policy / reference).log()).sum().item()
    for name in ("kl", "low_var_kl"):
        expected = (policy * kl_penalty(policy.log(), reference.log(), name)).sum().item()
        assert expected == pytest.approx(exact, abs=1e-6)


def test_an_unknown_estimator_is_named_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match="Did you mean 'low_var_kl'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var")


@pytest.mark.parametrize("name", ["kl", "abs", "mse", "low_var_kl"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    logprob, reference = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.5, -0.5])
    got = kl_penalty(logprob, reference, f"{name}+")
    torch.testing.assert_close(got, kl_penalty(logprob, reference, name))
    got.sum().backward()
    assert logprob.grad.tolist() == [0.5, -1.5]  # the difference of the log-probs
