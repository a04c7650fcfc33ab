"""Sample one token per row and its log-prob under the distribution that it was sampled from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl.workers.rollout.errors import NotFinite
from verl.workers.rollout.records import SamplingOptions


def process(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Log-probs [rows, vocabulary] after temperature, top-k and top-p; greedy leaves the logits alone."""
    warpers: list[LogitsProcessor] = []
    if options.temperature > 0:
        warpers.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k > 0:
            warpers.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            warpers.append(TopPLogitsWarper(options.top_p))
    scores = logits.float()
    for warper in warpers:
        scores = warper(None, scores)  # these three do not look at the tokens so far
    return scores.log_softmax(-1)


def sample(
    logits: torch.Tensor, options: Sequence[SamplingOptions], generators: Sequence[torch.Generator]
) -> tuple[list[int], list[float]]:
    """Token and log-prob of each row of `logits` [rows, vocabulary]; row i follows `options[i]` and `generators[i]`.

    Raises NotFinite for a row that has no probabilities: one of its logits is NaN or positive infinity."""
    alike: dict[tuple[float, int, float], list[int]] = defaultdict(list)
    for row, option in enumerate(options):
        alike[option.temperature, option.top_k, option.top_p].append(row)
    tokens = torch.empty(len(options), dtype=torch.int64)
    chosen = torch.empty(len(options))
    for rows in alike.values():
        log_probs = process(logits[rows], options[rows[0]])
        if log_probs.isnan().any():
            raise NotFinite("the policy's logits are not finite")
        if options[rows[0]].temperature == 0:
            picked = log_probs.argmax(-1)
        else:
            draws = [
                torch.multinomial(one.exp(), 1, generator=generators[row])
                for one, row in zip(log_probs, rows, strict=True)
            ]
            picked = torch.cat(draws)
        tokens[rows] = picked.cpu()
        chosen[rows] = log_probs.gather(-1, picked[:, None])[:, 0].cpu()
    return tokens.tolist(), chosen.tolist()
