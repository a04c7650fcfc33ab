"""Scalars that describe a batch, a step and a validation, under verl's names. Computed on the driver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, tensors_of
from verl.utils.plain import as_float, as_number, as_text
from verl.workers.rollout.records import NO_VERSION

BOOTSTRAPS, SEED = 1000, 42
"""Of validation, as in verl: the number of bootstrap draws, and their seed."""
PER_RESPONSE_TOKEN = ("gen",)
PER_TOKEN = ("old_log_prob", "ref", "values", "adv", "update_actor", "update_critic")
"""Phases whose seconds are also reported per token: of responses alone, or of prompts and responses."""


def compute_data_metrics(batch: DataProto) -> dict[str, float]:
    """Rewards, advantages and lengths of one training batch.

    Scores and rewards are sums per sequence, advantages and returns are taken per generated token; sequences without
    a response (aborted) count in `response/aborted_ratio` and the lengths only. Lengths count every attended token,
    tool outputs included. A metric whose tensors are not there, or that has nothing to count, is left out.
    """
    tensors = tensors_of(batch)
    max_prompt_length = tensors["prompts"].shape[-1]
    max_response_length = tensors["responses"].shape[-1]
    attended = tensors["attention_mask"].bool()
    prompt_length = attended[:, :max_prompt_length].sum(-1).float()
    response_length = attended[:, max_prompt_length:].sum(-1).float()
    generated = tensors["response_mask"].bool()
    answered = response_length > 0

    metrics: dict[str, float] = {}
    for key, name in (("token_level_scores", "score"), ("token_level_rewards", "rewards")):
        if key in tensors:
            metrics |= _spread(f"critic/{name}", tensors[key].sum(-1)[answered])
    if "token_level_scores" in tensors and "uid" in batch.non_tensor_batch:
        scores = tensors["token_level_scores"].sum(-1)[answered]
        metrics |= _spread_in_groups(scores, batch.non_tensor_batch["uid"][answered.numpy()])
    for key in ("advantages", "returns", "values"):
        if key in tensors:
            metrics |= _spread(f"critic/{key}", tensors[key][generated])
    if "values" in tensors and generated.sum() > 1:
        returns, errors = tensors["returns"][generated], (tensors["returns"] - tensors["values"])[generated]
        metrics["critic/vf_explained_var"] = float(1.0 - errors.var() / (returns.var() + 1e-5))
    metrics |= _spread("response_length", response_length)
    metrics |= _spread("prompt_length", prompt_length)
    if len(response_length):
        cut = (response_length == max_response_length).float()
        metrics["response_length/clip_ratio"] = cut.mean().item()
        metrics |= _spread("response_length_non_aborted", response_length[answered])
        if answered.any():
            metrics["response_length_non_aborted/clip_ratio"] = cut[answered].mean().item()
        metrics["prompt_length/clip_ratio"] = (prompt_length == max_prompt_length).float().mean().item()
        metrics["response/aborted_ratio"] = (~answered).float().mean().item()
    if "__num_turns__" in batch.non_tensor_batch:
        turns = torch.from_numpy(batch.non_tensor_batch["__num_turns__"].astype(np.float32))
        metrics |= _spread("num_turns", turns)
    return metrics


def _spread_in_groups(scores: torch.Tensor, uids: np.ndarray) -> dict[str, float]:
    """How much the scores (responses) of one prompt differ, under TRL's names: a group in which all are equal teaches
    an estimator that compares them nothing. Prompts with one response are no groups."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for uid, score in zip(uids.tolist(), scores.tolist(), strict=True):
        groups[uid].append(score)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return {}
    return {
        "critic/frac_reward_zero_std": float(np.mean([max(group) == min(group) for group in several])),
        "critic/reward_std": float(np.mean([np.std(group, ddof=1) for group in several])),
    }


def compute_staleness_metrics(batch: DataProto, *, trainer_version: int) -> dict[str, float]:
    """Staleness of each token: how many versions its weights are behind those that the trainer updates.

    With `rollout_kv_versions` the oldest version counts that it attends to, and `rollout/kv_mixed_tokens` is the number
    of tokens for which that is not their own. Empty if the batch has no `rollout_versions`, or its tokens' weights have
    no version.
    """
    tensors = tensors_of(batch)
    if "rollout_versions" not in tensors:
        return {}
    generated = tensors["response_mask"].bool()
    versions = tensors["rollout_versions"][generated]
    known = versions != NO_VERSION
    oldest = tensors.get("rollout_kv_versions", tensors["rollout_versions"])[generated]
    staleness = (trainer_version - oldest[known]).float()
    if not len(staleness):
        return {}
    mixed = (oldest < versions)[known].sum().item()
    return ({"rollout/kv_mixed_tokens": mixed} if "rollout_kv_versions" in tensors else {}) | {
        "training/staleness/mean": staleness.mean().item(),
        "training/staleness/max": staleness.max().item(),
        "training/staleness/min": staleness.min().item(),
    }


def compute_timing_metrics(batch: DataProto, timings: Mapping[str, float]) -> dict[str, float]:
    """`timings` (seconds per phase, see `marked_timer`) as `timing_s/...`, some also as `timing_per_token_ms/...`."""
    attended = tensors_of(batch)["attention_mask"]
    num_response_tokens = float(attended[:, -tensors_of(batch)["responses"].shape[1] :].sum())
    num_tokens = float(attended.sum())
    metrics = {f"timing_s/{name}": seconds for name, seconds in timings.items()}
    for names, count in ((PER_RESPONSE_TOKEN, num_response_tokens), (PER_TOKEN, num_tokens)):
        if count > 0:
            metrics |= {f"timing_per_token_ms/{name}": timings[name] * 1e3 / count for name in names if name in timings}
    return metrics


def compute_throughput_metrics(batch: DataProto, timings: Mapping[str, float], num_ranks: int) -> dict[str, float]:
    """Tokens of the step, its seconds (`timings["step"]`), and `perf/throughput`: tokens per second and rank."""
    num_tokens = float(tensors_of(batch)["attention_mask"].sum())
    seconds = timings["step"]
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * num_ranks),
    }


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = SEED
) -> dict[str, dict[str, dict[str, float]]]:
    """Validation results by data source, variable and statistic; all sequences have one entry per response.

    `sample_uids` are equal for the n responses to one prompt. `infos_dict` has the key `reward` and whatever else the
    reward function returned: numbers, None where a response has none, and optionally `pred`, the extracted answers.

    `mean@n` and `std@n` describe a prompt's n responses. For n > 1 there are `best@k/mean`, `worst@k/mean` and, with
    `pred`, `maj@k/mean`, each with its `/std`: of the best, the worst, and the first with the commonest `pred`, of k
    responses that are drawn BOOTSTRAPS times from the n, with replacement; k is 2, 4, 8, ... and n. All are means over
    prompts; one with a response without a prediction, or without the variable, has no majority, and one with a value
    that is no number is left out. Prompts with different numbers of responses are reported apart, each under its own n.
    """
    lengths = {"data_sources": len(data_sources), "sample_uids": len(sample_uids)}
    lengths |= {name: len(values) for name, values in infos_dict.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"validation results differ in length: {lengths}")
    prompts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for position, prompt in enumerate(zip(data_sources, sample_uids, strict=True)):
        prompts[prompt].append(position)

    collected: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    predictions = infos_dict.get("pred")
    for (data_source, _), positions in prompts.items():
        for variable, values in infos_dict.items():
            said = [values[position] for position in positions if values[position] is not None]
            numbers = [number for number in map(as_float, said) if number is not None]
            if not numbers or len(numbers) < len(said):
                continue
            voted = [] if predictions is None else [predictions[position] for position in positions]
            votes = _kinds(voted) if len(numbers) == len(voted) and None not in voted else None
            for statistic, value in _of_prompt(numbers, votes, seed).items():
                collected[data_source, variable, statistic].append(value)
    metrics: dict[str, dict[str, dict[str, float]]] = {}
    for (data_source, variable, statistic), of_prompts in collected.items():
        metrics.setdefault(data_source, {}).setdefault(variable, {})[statistic] = _mean(of_prompts)
    return metrics


def validation_names(metrics: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """What `process_validation_metrics` returns, in one dict.

    `val-core/<data source>/<variable>/<statistic>` are mean, best and majority of the most responses that a prompt
    has; the variable is `acc`, or `reward` where there is none. All others are `val-aux/...`.
    """
    named: dict[str, float] = {}
    for data_source, variables in metrics.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, statistics in variables.items():
            most = max(map(_size, statistics))
            for statistic, value in statistics.items():
                first = variable == core and statistic.startswith(("mean", "best", "maj")) and _size(statistic) == most
                named[f"{'val-core' if first else 'val-aux'}/{data_source}/{variable}/{statistic}"] = value
    return named


def _size(statistic: str) -> int:
    return int(statistic.partition("@")[2].partition("/")[0])


def _of_prompt(scores: Sequence[float], votes: np.ndarray | None, seed: int) -> dict[str, float]:
    """The statistics of the responses to one prompt."""
    found, values = {f"mean@{len(scores)}": _mean(scores)}, np.array(scores)
    if len(scores) == 1:
        return found
    with np.errstate(invalid="ignore"):
        found[f"std@{len(scores)}"] = float(np.std(values))
        for size in [*(2**power for power in range(1, 64) if 2**power < len(scores)), len(scores)]:
            drawn = _bootstraps(len(scores), size, seed)
            chosen = {"best": values[drawn].max(axis=1), "worst": values[drawn].min(axis=1)}
            if votes is not None:
                chosen["maj"] = values[_majority(votes, drawn)]
            for name, each in chosen.items():
                found[f"{name}@{size}/mean"] = float(np.mean(each))
                found[f"{name}@{size}/std"] = float(np.std(each))
    return found


@cache
def _bootstraps(total: int, size: int, seed: int) -> np.ndarray:
    """Positions [BOOTSTRAPS, size]; the draws of NumPy's old generator, as verl's numbers come from them."""
    drawn: np.ndarray = np.random.RandomState(seed).choice(total, size=(BOOTSTRAPS, size), replace=True)
    return drawn


def _majority(votes: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Of each draw [B, k] the position of the first of the commonest kind, [B]."""
    cast, draws = votes[drawn], np.arange(len(drawn))[:, None]
    counts = np.zeros((len(drawn), votes.max() + 1), dtype=int)
    np.add.at(counts, (draws, cast), 1)
    winners: np.ndarray = drawn[draws[:, 0], counts[draws, cast].argmax(axis=1)]
    return winners


def _mean(values: Sequence[float]) -> float:
    with np.errstate(invalid="ignore"):  # of infinities of both signs
        return float(np.mean(values))


def _kinds(predictions: Sequence[Any]) -> np.ndarray:
    """A number for each kind of prediction: 3, 3.0 and NumPy's are one, "3" another, lists are compared as texts."""
    kinds: dict[Any, int] = {}
    found = []
    for one in predictions:
        number = as_number(one)
        key = number if number is not None else one if isinstance(one, str) else (as_text(one),)
        found.append(kinds.setdefault(key, len(kinds)))
    return np.array(found)


_SPREAD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"mean": torch.mean, "max": torch.max, "min": torch.min}


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    return {f"{name}/{statistic}": float(function(values)) for statistic, function in _SPREAD.items()}
