"""Options of formulas drawn at random from all that both take, and batches to go with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from random import Random
from typing import Any

from tests.originals.batches import Batch, batch
from verl.workers.config.actor import LOSS_AGG_MODES
from verl.workers.config.algorithm import REJECTIONS

COLUMNS = 9
NEEDED = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
"""What verl's ActorConfig has no default for."""


@dataclass(frozen=True, slots=True)
class LossOptions:
    """(options of the actor, of `policy_loss`), as each side takes them, and what a mini-batch is divided by."""

    verls: tuple[dict[str, Any], dict[str, Any]]
    ours: tuple[dict[str, Any], dict[str, Any]]
    totals: dict[str, Any]


def batches(draw: Random, count: int, *, empty: bool) -> dict[str, Batch]:
    """Two to eight ragged responses each, in groups of any size, with holes, far off the old policy or not at all;
    `empty`: some of the responses have no token. Scores stand on tokens of the policy."""
    return {f"drawn {number}{' with empty' if empty else ''}": _batch(draw, empty) for number in range(count)}


def _batch(draw: Random, empty: bool) -> Batch:
    rows = draw.randint(2, 8)
    lengths = [draw.choice((1, draw.randint(1, COLUMNS), COLUMNS)) for _ in range(rows)]
    if empty:
        for row in draw.sample(range(rows), draw.randint(1, rows - 1)):
            lengths[row] = 0
    holes = [(row, column) for row, length in enumerate(lengths) for column in range(length - 1) if draw.random() < 0.1]
    scores = draw.choice((None, [float(draw.random() < 0.5) for _ in lengths], [draw.random()] * rows))
    index = "".join(draw.choice("abc") for _ in lengths)
    spread = draw.choice((0.0, 0.01, 0.4, 2.0))
    return batch(draw.randrange(1 << 30), index, lengths=lengths, holes=holes, scores=scores, spread=spread)


def loss_options(draw: Random) -> LossOptions:
    """A `clip_ratio_c` is above 1, and upper bounds are above lower ones, as both sides want them."""
    shared: dict[str, Any] = {"clip_ratio": draw.uniform(0.05, 0.5), "clip_ratio_c": draw.uniform(1.05, 6.0)}
    ranges = {"clip_ratio_low": draw.uniform(0.0001, 0.9), "clip_ratio_high": draw.uniform(0.0001, 2.0)}
    taus = {"tau_pos": draw.uniform(0.1, 5.0), "tau_neg": draw.uniform(0.1, 5.0)}
    lower = draw.uniform(-1.0, 1.0)
    of_loss = {
        "clip_cov_ratio": draw.choice((0.0002, draw.random())),
        "clip_cov_lb": lower,
        "clip_cov_ub": lower + draw.choice((0.1, 5.0)),
        "kl_cov_ratio": draw.choice((0.0002, draw.random(), 1.0)),
        "ppo_kl_coef": draw.choice((0.0, draw.uniform(0.0, 3.0))),
        "dro_beta": draw.uniform(0.01, 3.0),
    }
    totals = draw.choice(({}, {"num_tokens": draw.randint(20, 90), "num_sequences": draw.randint(4, 16)}))
    totals = totals | draw.choice(({}, {"loss_scale_factor": draw.randint(1, 2000)}))
    actor = shared | ranges
    return LossOptions((NEEDED | actor | taus, of_loss), (actor, of_loss | taus), totals)


def bypass_options(draw: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """(of the correction, of the actor), the same for both."""
    _, (actor, _), totals = astuple(loss_options(draw))
    factor = {name: totals[name] for name in ("loss_scale_factor",) if name in totals}
    return {**correction_options(draw), "loss_type": draw.choice(("ppo_clip", "reinforce"))}, actor | factor


def correction_options(draw: Random) -> dict[str, Any]:
    """Of `algorithm.rollout_correction`: weights of either level, and any of the rejections together."""
    options: dict[str, Any] = {}
    if draw.random() < 0.6:
        upper = draw.uniform(0.6, 5.0)
        bounds = draw.choice((upper, f"{draw.uniform(0.01, 0.55):.4f}_{upper:.4f}"))
        options |= {"rollout_is": draw.choice(("token", "sequence")), "rollout_is_threshold": bounds}
        options["rollout_is_batch_normalize"] = draw.random() < 0.5
    if draw.random() < 0.7:
        names = draw.sample(REJECTIONS, draw.choice((1, 1, 2, 3)))
        options["rollout_rs"] = ",".join(names)
        options["rollout_rs_threshold"] = ",".join(_bound(draw, name) for name in names)
    return options


def _bound(draw: Random, name: str) -> str:
    if not name.endswith("k1"):
        return f"{draw.choice((0.001, draw.uniform(0.01, 2.0))):.4f}"
    upper = draw.choice((1.001, draw.uniform(1.01, 3.0)))
    return draw.choice((f"{upper:.4f}", f"{draw.uniform(0.3, 0.999):.4f}_{upper:.4f}"))


def formula_cases(draw: Random, names: dict[str, Batch], rounds: int) -> Iterator[tuple[Any, ...]]:
    """Cases of `score_formulas.py`."""
    for name in names:
        for _ in range(rounds):
            spans = {"gamma": draw.choice((0.0, 1.0, draw.random())), "lam": draw.choice((0.0, 1.0, draw.random()))}
            for estimator in ("gae", "reinforce_plus_plus"):
                yield "estimator", name, estimator, spans
            for estimator in ("remax", "opo", "rloo", "rloo_vectorized", "gpg", "reinforce_plus_plus_baseline"):
                yield "estimator", name, estimator, spans
            divided = {"norm_adv_by_std_in_grpo": draw.random() < 0.5}
            for estimator in ("grpo", "grpo_vectorized", "grpo_passk"):
                yield "estimator", name, estimator, divided
            for estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
                yield "estimator", name, estimator, spans, draw.random() < 0.5
            weights = [draw.choice((0.0, 1.0, draw.uniform(-1.0, 2.0))) for _ in range(3)]
            yield "components", name, {"gdpo_reward_weights": weights, **divided}
            mode = draw.choice(LOSS_AGG_MODES)
            told = {"dp_size": draw.randint(1, 8), "batch_num_tokens": draw.randint(1, 99)}
            told |= {"global_batch_size": draw.randint(1, 99)}
            told |= draw.choice(({}, {"loss_scale_factor": draw.choice((0.5, draw.randint(1, 999)))}))
            yield "aggregation", name, mode, told
            yield "value loss", name, mode, draw.choice((0.0001, draw.uniform(0.01, 3.0)))
            yield "redrawn", name, draw.choice(("pow", "max_min", "max_random")), draw.uniform(0.1, 4.0)
            yield "correction", name, correction_options(draw)


def divergences_in_reward(draw: Random, names: dict[str, Batch], kinds: list[str]) -> Iterator[tuple[Any, ...]]:
    """An adaptive coefficient over some batches, from far above its target to far below."""
    for name in names:
        options = {"init_kl_coef": draw.choice((0.0, draw.uniform(0.0001, 2.0)))}
        options |= {"target_kl": 10 ** draw.uniform(-4, 1), "horizon": draw.choice((1, 50, 10000))}
        yield "kl in reward", name, "adaptive", draw.choice(kinds), options, draw.randint(1, 5)


def schedules(draw: Random, count: int) -> Iterator[tuple[Any, ...]]:
    """Up to their last step: a warm-up may be longer than the whole."""
    for _ in range(count):
        total = draw.choice((None, 1, draw.randint(1, 40)))
        options = {
            "min_lr_ratio": draw.choice((0.0, draw.random())),
            "num_cycles": draw.choice((0.5, draw.random(), 2)),
        }
        options |= {"zero_indexed_step": draw.random() < 0.5}
        warmup = draw.choice((0, draw.randint(0, 45)))
        yield "schedule", "two groups", warmup, total, options if total else {}, total or 40


def groups(draw: Random, count: int) -> Iterator[tuple[Any, ...]]:
    """Of one to ten responses, of equal rewards or not: hundredths, whose deviations are rounded, and any number."""
    for _ in range(count):
        made = []
        for _ in range(draw.randint(1, 8)):
            values = draw.choice(([0.0, 1.0], [draw.randint(0, 99) / 100], [draw.uniform(-1, 1)], [0.1, 0.1 + 1e-6]))
            made.append([draw.choice(values) for _ in range(draw.randint(1, 10))])
        yield "filter", "two groups", draw.choice(("reward", "acc")), made
