"""Requests to sample, read and checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl.tenants import losses
from verl.tenants.base import Base
from verl.tenants.fields import Fields
from verl.tenants.refused import Refused
from verl.tenants.sampler import Asked

MOST_SAMPLES, MOST_LIKELIEST = 128, 20


def read_asked(fields: Fields, base: Base) -> Asked:
    """Raises Refused for what cannot be sampled."""
    prompt = _prompt(fields.take("prompt", dict), base.vocabulary)
    params = Fields(fields.take("sampling_params", dict), "sampling_params")
    room = base.context - len(prompt)
    if not len(prompt) or room < 1:
        raise Refused(f"the prompt has {len(prompt)} tokens; the model takes 1 to {base.context - 1}")
    tokens, strings = _stops(params.anything("stop"), base)
    last = fields.maybe("prompt_logprobs_last_n", int)
    asked = Asked(
        prompt=prompt,
        number=fields.number("num_samples", int, 1, 1, MOST_SAMPLES),
        max_tokens=params.number("max_tokens", int, room, 1, room),
        temperature=params.number("temperature", float, 1.0, 0.0),
        top_k=params.number("top_k", int, -1, -1),
        top_p=params.number("top_p", float, 1.0, 1e-9, 1.0),
        seed=params.seed(),
        stop_tokens=tokens,
        stop_strings=strings,
        prompt_logprobs=fields.take("prompt_logprobs", bool, False),
        prompt_logprobs_last=last,
        likeliest_of_prompt=fields.number("topk_prompt_logprobs", int, 0, 0, MOST_LIKELIEST),
        likeliest_of_samples=fields.number("topk_sample_logprobs", int, 0, 0, MOST_LIKELIEST),
    )
    if last is not None and not 1 <= last < len(prompt):
        raise Refused(f"prompt_logprobs_last_n={last} is not from 1 to {len(prompt) - 1}")
    params.end()
    fields.without_effect("type")
    fields.end()
    return asked


def _stops(stop: Any, base: Base) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Tokens and strings; the model's own end is one of them, but for an empty list."""
    given = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(given, list) or not all(type(each) is int or (isinstance(each, str) and each) for each in given):
        raise Refused(f"sampling_params.stop is a string, or a list of strings or of tokens, not {stop!r:.80}")
    tokens = [each for each in given if isinstance(each, int)]
    own = [] if stop == [] else base.ends
    return (*tokens, *own), tuple(each for each in given if isinstance(each, str))


def _prompt(given: dict[str, Any], vocabulary: int) -> np.ndarray:
    chunks = given.get("chunks")
    if not isinstance(chunks, list) or not all(isinstance(each, dict) for each in chunks):
        raise Refused("prompt.chunks is a list of objects")
    if other := [each.get("type") for each in chunks if each.get("type", "encoded_text") != "encoded_text"]:
        raise Refused(f"prompt has a chunk of type {other[0]!r}; text alone is served")
    lists = [each.get("tokens") for each in chunks]
    if not all(isinstance(each, list) and all(type(token) is int for token in each) for each in lists):
        raise Refused("prompt has a chunk whose tokens are no list of integers")
    tokens = [token for each in lists for token in each]
    losses.check_tokens(tokens, vocabulary, "prompt")
    return np.array(tokens, dtype=np.int64)
