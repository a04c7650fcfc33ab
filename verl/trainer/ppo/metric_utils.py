"""Scalars that describe a batch, a step and a validation, under verl's names. Computed on the driver."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, tensors_of
from verl.utils.plain import as_float, as_number
from verl.workers.rollout.records import NO_VERSION

PER_RESPONSE_TOKEN = ("gen",)
PER_TOKEN = ("old_log_prob", "ref", "values", "adv", "update_actor", "update_critic")
"""Phases whose seconds are also reported per token: of the responses, or of prompts and responses."""


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
    for key in ("advantages", "returns", "values"):
        if key in tensors:
            metrics |= _spread(f"critic/{key}", tensors[key][generated])
    if "values" in tensors and generated.sum() > 1:
        returns, errors = tensors["returns"][generated], (tensors["returns"] - tensors["values"])[generated]
        metrics["critic/vf_explained_var"] = float(1.0 - errors.var() / (returns.var() + 1e-5))
    metrics |= _spread("response_length", response_length)
    metrics |= _spread("prompt_length", prompt_length)
    if len(response_length):
        metrics["response_length/clip_ratio"] = (response_length == max_response_length).float().mean().item()
        metrics["prompt_length/clip_ratio"] = (prompt_length == max_prompt_length).float().mean().item()
        metrics["response/aborted_ratio"] = (~answered).float().mean().item()
    if "__num_turns__" in batch.non_tensor_batch:
        turns = torch.from_numpy(batch.non_tensor_batch["__num_turns__"].astype(np.float32))
        metrics |= _spread("num_turns", turns)
    return metrics


def compute_staleness_metrics(batch: DataProto, *, trainer_version: int) -> dict[str, float]:
    """How old the policy was that sampled each token: versions behind the one that the trainer updates.

    Empty for a batch without `rollout_versions`, or whose tokens come from weights that have no version.
    """
    tensors = tensors_of(batch)
    if "rollout_versions" not in tensors:
        return {}
    versions = tensors["rollout_versions"][tensors["response_mask"].bool()]
    staleness = (trainer_version - versions[versions != NO_VERSION]).float()
    if not len(staleness):
        return {}
    return {
        "training/staleness/mean": staleness.mean().item(),
        "training/staleness/max": staleness.max().item(),
        "training/staleness/min": staleness.min().item(),
    }


def compute_timing_metrics(batch: DataProto, timings: Mapping[str, float]) -> dict[str, float]:
    """`timings` (seconds per phase, see `marked_timer`) as `timing_s/...`, some also as `timing_per_token_ms/...`."""
    num_response_tokens = float(tensors_of(batch)["response_mask"].sum())
    num_tokens = float(tensors_of(batch)["attention_mask"].sum())
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
    data_sources: Sequence[str], sample_uids: Sequence[str], infos: Mapping[str, Sequence[Any]]
) -> dict[str, float]:
    """Validation results per data source; all sequences have one entry per response.

    `sample_uids` are equal for the n responses to one prompt. `infos` has the key `reward` and whatever else the reward
    function returned: numbers, None where a response has none, and optionally `pred`, the extracted answers.

    * `val-core/<data_source>/reward/mean@n`: mean over prompts of the mean over a prompt's n responses.
    * `val-aux/<data_source>/reward/best@n`: the best of the n; `maj@n`: the response with the commonest `pred`, the
      earliest of equals. For n > 1 only.
    * `val-aux/<data_source>/<other>/mean@n` and `best@n` for other numbers.

    Prompts with different numbers of responses are reported apart, each under its own n.
    """
    lengths = {"data_sources": len(data_sources), "sample_uids": len(sample_uids)}
    lengths |= {name: len(values) for name, values in infos.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"validation results differ in length: {lengths}")
    prompts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for position, prompt in enumerate(zip(data_sources, sample_uids, strict=True)):
        prompts[prompt].append(position)

    collected: dict[str, list[float]] = defaultdict(list)
    predictions = infos.get("pred")
    for (data_source, _), positions in prompts.items():
        for variable, values in infos.items():
            found = [(position, as_float(values[position])) for position in positions]
            numbers = [(position, number) for position, number in found if number is not None]
            if not numbers:
                continue
            section = "val-core" if variable == "reward" else "val-aux"
            scores = [number for _, number in numbers]
            collected[f"{section}/{data_source}/{variable}/mean@{len(scores)}"].append(_mean(scores))
            if len(scores) == 1:
                continue
            collected[f"val-aux/{data_source}/{variable}/best@{len(scores)}"].append(max(scores))
            if variable == "reward" and predictions is not None:
                majority = _majority([predictions[position] for position, _ in numbers])
                collected[f"val-aux/{data_source}/reward/maj@{len(scores)}"].append(scores[majority])
    return {name: _mean(values) for name, values in collected.items()}


def _mean(values: Sequence[float]) -> float:
    with np.errstate(invalid="ignore"):  # of infinities of both signs
        return float(np.mean(values))


def _majority(predictions: Sequence[Any]) -> int:
    """Position of the first prediction of the commonest kind."""
    keys = [_text(prediction) for prediction in predictions]
    return keys.index(Counter(keys).most_common(1)[0][0])


def _text(prediction: Any) -> str:
    """Equal numbers are equal predictions, whichever type they have: 3, 3.0 and NumPy's."""
    number = as_number(prediction)
    if number is None:
        return str(prediction)
    return str(int(number) if isinstance(number, float) and number.is_integer() else number)


_SPREAD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"mean": torch.mean, "max": torch.max, "min": torch.min}


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    return {f"{name}/{statistic}": float(function(values)) for statistic, function in _SPREAD.items()}
