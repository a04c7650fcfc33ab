from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.even_batches import padded
from verl.trainer.ppo.policy_filtration import filtered, filtration_weights
from verl.workers.config.algorithm import PolicyFiltrationConfig

SCORES = [-2.0, 0.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("method", "power", "scores", "expected"),
    [
        ("pow", 2.0, SCORES, [4.0, 0.0, 1.0, 9.0, 9.0]),
        ("pow", 1.0, SCORES, [2.0, 0.0, 1.0, 3.0, 3.0]),
        ("pow", 0.0, SCORES, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("max_min", 2.0, SCORES, [1.0, 0.0, 0.0, 1.0, 1.0]),
        ("max_random", 2.0, SCORES, [1.0, 1.0, 1.0, 4.0, 4.0]),
        ("pow", 2.0, [0.0, 0.0], [1.0, 1.0]),
        ("max_min", 2.0, [0.5, 0.5], [1.0, 1.0]),
        ("max_random", 2.0, [-1.0, 0.0], [1.0, 4.0]),
    ],
)
def test_weights_are_those_of_the_scores(method, power, scores, expected):
    settings = PolicyFiltrationConfig(reweight_method=method, weight_pow=power)
    assert filtration_weights(torch.tensor(scores), settings).tolist() == expected


def scored(scores):
    """One token each, whose number is that of the row."""
    rows = torch.arange(len(scores)).unsqueeze(-1)
    tensors = {
        "responses": rows,
        "advantages": rows.float() / 10,
        "response_mask": torch.ones_like(rows),
        "token_level_scores": torch.tensor(scores).unsqueeze(-1),
    }
    return DataProto.from_dict(tensors, {"uid": np.array([f"u{row}" for row in range(len(scores))], dtype=object)})


def rows_of(batch):
    return tensors_of(batch)["responses"].flatten().tolist()


def test_whole_samples_are_drawn_as_often_as_their_weights_say():
    scores = [-2.0, 0.0, 1.0, 3.0] * 1000
    drawn, metrics = filtered(scored(scores), PolicyFiltrationConfig(), seed=3)
    rows = rows_of(drawn)
    assert len(rows) == 4000
    shares = [sum(row % 4 == kind for row in rows) / 4000 for kind in range(4)]
    assert shares == pytest.approx([4 / 14, 0.0, 1 / 14, 9 / 14], abs=0.03)
    assert [f"u{row}" for row in rows] == drawn.non_tensor_batch["uid"].tolist()
    assert torch.equal(tensors_of(drawn)["advantages"].flatten(), torch.tensor(rows) / 10)
    assert metrics == {"pf_ppo/distinct_samples": len(set(rows))}


def test_a_step_that_is_made_again_draws_the_same_and_another_step_does_not():
    batch, settings = scored([1.0] * 64), PolicyFiltrationConfig()
    first, again, other = (rows_of(filtered(batch, settings, seed=seed)[0]) for seed in (7, 7, 8))
    assert first == again != other


def test_padding_is_never_drawn():
    batch = padded(scored([1.0, 2.0, 3.0]), 4)
    settings = PolicyFiltrationConfig(reweight_method="max_min")
    for seed in range(20):
        drawn, _ = filtered(batch, settings, seed)
        assert len(drawn) == 3
        assert set(drawn.non_tensor_batch["uid"].tolist()) <= {"u0", "u2"}
