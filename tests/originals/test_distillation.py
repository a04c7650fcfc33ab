"""Losses of on-policy distillation against PyPI's verl: value, gradient and metrics with any options that both take."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.originals.original import VERL, computed
from verl.protocol import DataProto
from verl.workers.config import ActorConfig, DistillationLossConfig
from verl.workers.config.actor import LOSS_AGG_MODES
from verl.workers.config.distillation import ESTIMATORS, FORWARD_KL_TOPK
from verl.workers.distilled_loss import TEACHER_CANDIDATE_LOG_PROBS, TEACHER_LOG_PROBS, DistilledLoss
from verl.workers.engine.base import CANDIDATE_LOG_PROBS
from verl.workers.losses import LossTotals

VOCABULARY, COUNT = 11, 300
BEFORE_THE_UPDATE = {"actor/distillation/loss_min", "actor/distillation/loss_max"}
"""The driver tells these here."""

Case = dict[str, Any]


def options(draw: Random, mode: str) -> dict[str, Any]:
    by_gradient = mode == FORWARD_KL_TOPK or (mode not in ("k1", "kl") and draw.random() < 0.6)
    return {
        "loss_mode": mode,
        "topk": draw.choice((1, 3, 5)) if mode == FORWARD_KL_TOPK else 1,
        "use_policy_gradient": not by_gradient,
        "use_task_rewards": draw.random() < 0.5,
        "distillation_loss_coef": draw.uniform(0.0, 2.0),
        "loss_max_clamp": draw.choice((None, 0.2, 1.0, 10.0)),
        "log_prob_min_clamp": draw.choice((None, -2.0, -10.0)),
        "clip_ratio_low": draw.uniform(0.05, 0.4),
        "clip_ratio_high": draw.uniform(0.05, 0.4),
    }


def case(seed: int) -> Case:
    """One to four ragged sequences with holes, of a student near its teacher or far from it."""
    draw, normal = Random(seed), torch.Generator().manual_seed(seed)
    of_loss = options(draw, [*ESTIMATORS, FORWARD_KL_TOPK][seed % (len(ESTIMATORS) + 1)])
    rows = range(draw.randint(1, 4))
    prompts, responses = (
        [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, most))] for _ in rows] for most in (3, 6)
    )
    following = [token for row in rows for token in [*prompts[row], *responses[row]][1:] + [0]]
    spread = draw.choice((0.5, 2.0, 8.0))
    logits, teacher = torch.randn(2, len(following), VOCABULARY, generator=normal) * spread
    said = teacher.log_softmax(-1)
    candidates = torch.tensor(following).unsqueeze(-1)
    if of_loss["loss_mode"] == FORWARD_KL_TOPK:
        candidates = said.topk(of_loss["topk"]).indices
    lengths = [len(prompts[row]) + len(responses[row]) for row in rows]
    student = logits.log_softmax(-1).gather(-1, torch.tensor(following).unsqueeze(-1)).squeeze(-1)
    near = [
        [value + draw.gauss(0.0, 0.3) for value in of_response(part, prompts[row], responses[row]).tolist()]
        for row, part in enumerate(student.split(lengths))
    ]
    return {
        "prompts": prompts,
        "responses": responses,
        "width": max(map(len, responses)),
        "next": following,
        "logits": logits.tolist(),
        "teacher": [part.tolist() for part in said.gather(-1, candidates).split(lengths)],
        "candidates": [part.tolist() for part in candidates.split(lengths)],
        "mask": [[int(at == 0 or draw.random() < 0.9) for at in range(len(responses[row]))] for row in rows],
        "old": near,
        "ref": [[value + draw.gauss(0.0, 0.3) for value in row] for row in near],
        "advantages": [[draw.gauss(0.0, 1.0)] * len(row) for row in near],
        "options": of_loss,
        "actor": {
            "loss_agg_mode": draw.choice(LOSS_AGG_MODES),
            "loss_scale_factor": draw.choice((None, 3)),
            "entropy_coeff": draw.choice((0.0, 0.1)),
            "use_kl_loss": draw.random() < 0.5,
            "kl_loss_coef": draw.uniform(0.0, 1.0),
        },
    }


def of_response(values: torch.Tensor, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Of the values at every token those that are about the next one being in the response."""
    return values[len(prompt) - 1 : len(prompt) - 1 + len(response)]


def ours(given: Case) -> dict[str, Any]:
    lengths = [
        len(prompt) + len(response) for prompt, response in zip(given["prompts"], given["responses"], strict=True)
    ]

    def padded(values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        parts = zip(values.split(lengths), given["prompts"], given["responses"], strict=True)
        return pad_sequence([of_response(*part) for part in parts], batch_first=True, padding_value=fill)

    def rows(name: str) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in given[name]], batch_first=True)

    logits = torch.tensor(given["logits"], requires_grad=True)
    shares = logits.log_softmax(-1)
    log_prob = padded(shares.gather(-1, torch.tensor(given["next"]).unsqueeze(-1)).squeeze(-1))
    teacher, candidates = (torch.cat([torch.tensor(row) for row in given[name]]) for name in ("teacher", "candidates"))
    names = {"response_mask": "mask", "old_log_probs": "old", "ref_log_prob": "ref", "advantages": "advantages"}
    batch = {ours: rows(verls) for ours, verls in names.items()}
    config = DistillationLossConfig(**given["options"])
    if config.uses_topk:
        batch[TEACHER_CANDIDATE_LOG_PROBS] = padded(teacher, float("-inf"))
        batch[CANDIDATE_LOG_PROBS] = padded(shares.gather(-1, candidates))
    else:
        batch[TEACHER_LOG_PROBS] = padded(teacher.squeeze(-1))
    loss, metrics = DistilledLoss(ActorConfig(**given["actor"]), config, None)(
        log_prob,
        padded(-(shares.exp() * shares).sum(-1)),
        DataProto.from_dict(batch),
        LossTotals.of(batch["response_mask"]),
    )
    loss.backward()
    numbers = {name: float(value) for name, value in metrics.items()}
    return {"loss": loss.item(), "gradient": logits.grad.flatten().tolist(), "metrics": numbers}


@pytest.fixture(scope="module")
def both() -> list[tuple[Case, dict[str, Any], dict[str, Any]]]:
    cases = [case(seed) for seed in range(COUNT)]
    verls = computed("distill.py", cases, VERL)
    return [(given, of_verl, ours(given)) for given, of_verl in zip(cases, verls, strict=True)]


@pytest.mark.parametrize("mode", [*ESTIMATORS, FORWARD_KL_TOPK])
def test_a_loss_with_a_teacher_its_gradient_and_its_metrics_are_verls_with_any_options(both: Any, mode: str) -> None:
    compared = [one for one in both if one[0]["options"]["loss_mode"] == mode]
    assert len(compared) > 30
    for given, verls, own in compared:
        told = given["options"], given["actor"]
        assert own["loss"] == pytest.approx(verls["loss"], rel=1e-4, abs=1e-4), told
        assert own["gradient"] == pytest.approx(verls["gradient"], rel=1e-3, abs=1e-4), told
        named = {
            name if name.startswith("actor/") else f"actor/{name}": value for name, value in verls["metrics"].items()
        }
        shared = named.keys() & own["metrics"].keys()
        assert shared >= {"actor/distillation/loss"}
        assert {name: own["metrics"][name] for name in shared - BEFORE_THE_UPDATE} == pytest.approx(
            {name: named[name] for name in shared - BEFORE_THE_UPDATE}, rel=1e-3, abs=1e-4
        ), told
