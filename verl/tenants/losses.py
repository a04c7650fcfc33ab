"""The losses of the Tinker protocol: a sum over tokens, of their log-probs and of what a client sends beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from verl.tenants.refused import Refused
from verl.tenants.wire import Batch, Datum

TARGETS = "target_tokens"
INPUTS = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
}
"""Of each loss, beside TARGETS; float32."""
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Options of `ppo`: between these the ratio of probabilities counts."""


def check(batch: Batch, *, vocabulary: int, context: int) -> None:
    """Raises Refused for a batch that no loss can be computed of."""
    if batch.loss not in INPUTS:
        raise Refused(f"loss_fn {batch.loss!r} is not served; these are: {', '.join(INPUTS)}")
    known = CLIPS if batch.loss == "ppo" else {}
    for name, value in batch.options.items():
        if name not in known or isinstance(value, str):
            raise Refused(f"loss_fn_config of {batch.loss} has {', '.join(known) or 'no options'}, not {name}={value}")
    if not batch.data:
        raise Refused("the batch has no data")
    for index, datum in enumerate(batch.data):
        _check(datum, (TARGETS, *INPUTS[batch.loss]), f"data[{index}]", vocabulary, context)


def _check(datum: Datum, names: tuple[str, ...], where: str, vocabulary: int, context: int) -> None:
    length = len(datum.tokens)
    if not 1 <= length <= context:
        raise Refused(f"{where} has {length} tokens; the model takes 1 to {context}")
    if set(datum.inputs) != set(names):
        raise Refused(f"{where}: loss_fn_inputs are {', '.join(names)}, not {', '.join(datum.inputs) or 'none'}")
    for name, values in datum.inputs.items():
        wanted = "int64" if name == TARGETS else "float32"
        if values.dtype.name != wanted:
            raise Refused(f"{where}.{name} has dtype {values.dtype.name}, not {wanted}")
        if values.shape != (length,):
            raise Refused(
                f"{where}.{name} has shape {list(values.shape)}; one value for each of {length} tokens is asked"
            )
        if not np.isfinite(values).all():
            raise Refused(f"{where}.{name} has a value that is not finite")
    check_tokens(datum.tokens, vocabulary, f"{where}.model_input")
    check_tokens(datum.inputs[TARGETS], vocabulary, f"{where}.{TARGETS}")


def check_tokens(tokens: Iterable[int], vocabulary: int, where: str) -> None:
    """Raises Refused for an id that the model does not have."""
    if wrong := [int(token) for token in tokens if not 0 <= token < vocabulary]:
        raise Refused(f"{where} has the id {wrong[0]}; the model has 0 to {vocabulary - 1}")


def loss_of(name: str, logprobs: torch.Tensor, datum: Datum, options: Mapping[str, float | str]) -> torch.Tensor:
    """The loss of one datum, a scalar. `logprobs`: float32 [n], of its targets."""
    given = {key: torch.from_numpy(datum.inputs[key].copy()) for key in INPUTS[name]}
    if name == "cross_entropy":
        return -(logprobs * given["weights"]).sum()
    ratio, advantages = (logprobs - given["logprobs"]).exp(), given["advantages"]
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    low, high = (float(options.get(key, default)) for key, default in CLIPS.items())
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
