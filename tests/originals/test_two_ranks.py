"""Whole training steps on two ranks against PyPI's verl: every metric, and the weights that result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.originals.drawn_runs import ACTOR, CORRECTION, CRITIC
from tests.originals.original import OURS, VERL, computed, differences
from tests.originals.test_drawn_steps import differing
from tests.originals.test_whole_steps import batch, write_models
from verl.workers.engine.micro_batches import MicroBatchLimits, partition

Rows = dict[str, list[Any]]
SHARED = {
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 2,
    **{
        f"{role}.optim.{name}": value for role in (ACTOR, CRITIC) for name, value in (("lr", 1e-3), ("clip_grad", 0.05))
    },
}
PPO: dict[str, Any] = {
    **SHARED,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.kl_coef": 0.1,
    f"{CORRECTION}.rollout_is": "token",
    "trainer.balance_batch": False,  # of mini-batches, it matters which sequences they have
    **{f"{role}.ppo_mini_batch_size": 2 for role in (ACTOR, CRITIC)},
    **{f"{role}.ppo_epochs": 2 for role in (ACTOR, CRITIC)},
    **{f"{role}.use_dynamic_bsz": True for role in (ACTOR, CRITIC)},
    **{f"{role}.ppo_max_token_len_per_gpu": 13 for role in (ACTOR, CRITIC)},
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0.01,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.1,
    f"{CRITIC}.loss_agg_mode": "seq-mean-token-mean",
}
KL_COV: dict[str, Any] = {
    **SHARED,
    "algorithm.adv_estimator": "grpo",
    "trainer.balance_batch": False,  # of micro-batches, too
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
    f"{ACTOR}.ppo_epochs": 2,
    f"{ACTOR}.policy_loss.loss_mode": "kl_cov",
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.2,
}
RUNS = {"ppo": PPO, "kl_cov": KL_COV}
MEGATRON = {f"{ACTOR}.strategy": "megatron", f"{CRITIC}.strategy": "megatron", f"{ACTOR}.megatron.dtype": "float32"}
OURS_OF: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in RUNS},
    "ppo on megatron": ("ppo", MEGATRON),
    "ppo on two stages": ("ppo", MEGATRON | {f"{ACTOR}.megatron.pipeline_model_parallel_size": 2}),
}
"""Our run -> (verl's, our other options)."""


def by_length(rows: Rows) -> Rows:
    """The longest first: the second rank has fewer tokens, and fewer micro-batches."""
    order = sorted(range(8), key=lambda row: -sum(rows["attention_mask"][row]))
    return {name: [values[row] for row in order] for name, values in rows.items()}


def equally_wide(seed: int) -> Rows:
    """Every sequence is as wide as the others, with holes: micro-batches then have the same sequences on both sides."""
    draw, rows = torch.Generator().manual_seed(seed), batch(seed)
    ids = torch.randint(1, 4096, (8, 12), generator=draw)
    mask = torch.ones(8, 7).long()
    for row, hole in enumerate(torch.randint(0, 5, (8,), generator=draw).tolist()):
        mask[row, 1 : 1 + hole] = 0
    tensors = {
        "prompts": ids[:, :5],
        "responses": ids[:, 5:],
        "input_ids": ids,
        "attention_mask": torch.ones(8, 12).long(),
        "position_ids": torch.arange(12).expand(8, 12),
        "response_mask": mask,
        "rollout_log_probs": (-torch.rand(8, 7, generator=draw) - 8.0) * mask,
        "rm_scores": torch.rand(8, 1, generator=draw) * (torch.arange(7) == 6),
    }
    return rows | {name: tensor.tolist() for name, tensor in tensors.items()}


BATCHES = {"ppo": [by_length(batch(0))], "kl_cov": [equally_wide(0)]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    policy, critic = (tmp_path_factory.mktemp(name) for name in ("policy", "critic"))
    write_models(policy, critic)
    return policy, critic


@pytest.fixture(scope="module")
def both(models: tuple[Path, Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(verl's, ours): by run and step."""
    given = {"policy": str(models[0]), "critic": str(models[1]), "ranks": 2}
    of_verl = {"runs": [*RUNS.values()], "batches": [BATCHES[name] for name in RUNS]}
    verls = computed("take_steps.py", given | of_verl, VERL)
    runs = [RUNS[name] | other for name, other in OURS_OF.values()]
    options = [[f"{key}={json.dumps(value)}" for key, value in run.items()] for run in runs]
    of_us = {"runs": options, "batches": [BATCHES[name] for name, _ in OURS_OF.values()]}
    ours = computed("take_our_steps.py", given | of_us, OURS)
    return dict(zip(RUNS, verls, strict=True)), dict(zip(OURS_OF, ours, strict=True))


def test_the_ranks_have_different_numbers_of_tokens() -> None:
    for rows in BATCHES["ppo"]:
        lengths = [sum(row) for row in rows["attention_mask"]]
        assert sum(lengths[:4]) > 1.4 * sum(lengths[4:])
        assert lengths[1] + lengths[2] > PPO[f"{ACTOR}.ppo_max_token_len_per_gpu"] >= lengths[-2] + lengths[-1]


def test_tokens_are_chosen_from_verls_micro_batches_where_sequences_are_equally_wide() -> None:
    assert differences()["tokens that kl_cov and clip_cov choose"]["why"]
    neighbours = [[row, row + 1] for row in range(0, 8, 2)]
    for rows, same in ((BATCHES["kl_cov"][0], True), (batch(0), False)):
        widths = [(sum(row[:5]), sum(row[5:])) for row in rows["attention_mask"]]
        assert (partition(widths, MicroBatchLimits(max_sequences=2)) == neighbours) is same


def test_which_sequences_share_an_update_where_ranks_share_layers_is_listed() -> None:
    """The two stages are one data-parallel rank: their steps are those of verl's two."""
    assert differences()["mini-batches of ranks that share sequences or layers"]["why"]


@pytest.mark.parametrize("name", OURS_OF)
def test_a_step_of_two_ranks_has_verls_metrics(both: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    for verls, ours in zip(both[0][OURS_OF[name][0]], both[1][name], strict=True):
        assert differing(verls, ours) == {}


@pytest.mark.parametrize(
    ("name", "role"), [*((name, "actor") for name in OURS_OF), *((name, "critic") for name in OURS_OF if "ppo" in name)]
)
@pytest.mark.usefixtures("both")
def test_two_ranks_learn_what_verls_learn(models: tuple[Path, Path], name: str, role: str) -> None:
    """Far more exactly than any metric tells."""
    of = OURS_OF[name][0]
    start = load_file(models[role == "critic"] / "model.safetensors")
    verls = torch.load(models[0] / f"verls-{[*RUNS].index(of)}" / f"{role}.pt")
    ours = load_file(models[0] / f"ours-{[*OURS_OF].index(name)}" / role / "model.safetensors")
    assert ours.keys() == start.keys() <= verls.keys()
    moved = distance(ours, start)
    assert moved > 0.05
    assert distance(verls, ours) < 1e-4 * moved


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(one[name] - value).norm() for name, value in other.items()]).norm())
