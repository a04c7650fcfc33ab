"""The loops of `verl.workers.hf.exact`, compiled by numba, which vLLM brings."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def attend_in_order(query: Any, keys: Any, values: Any, scale: Any, output: Any) -> None:
    """The loops over keys in the first step and over a head's width in the last are those that a compiler vectorizes:
    neither is a sum, so that the width of vectors does not matter."""
    tokens, heads, width = query.shape
    length = keys.shape[2]
    weights = np.empty(length, np.float32)
    for head in range(heads):
        shared = head * keys.shape[0] // heads
        for token in range(tokens):
            seen = length - tokens + token + 1
            weights[:seen] = 0
            for i in range(width):
                factor = query[token, head, i]
                for key in range(seen):
                    weights[key] += factor * keys[shared, i, key]
            largest = weights[:seen].max()
            total = np.float32(0)
            for key in range(seen):
                weights[key] = math.exp((weights[key] - largest) * scale)
                total += weights[key]
            output[token, head] = 0
            for key in range(seen):
                factor = weights[key] / total
                for i in range(width):
                    output[token, head, i] += factor * values[shared, key, i]
