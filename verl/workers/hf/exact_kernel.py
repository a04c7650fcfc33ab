"""The loops of `verl.workers.hf.exact`, compiled by numba, which vLLM brings."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def attend_in_order(
    query: Any, keys: Any, values: Any, pages: Any, query_ends: Any, key_ends: Any, scale: Any, output: Any
) -> None:
    """Fill `output`, float32 [T, H, d], from `query`, of the same, for sequences one after the other.

    `keys` and `values` are bits of float32 or bfloat16, [pages, tokens of a page, G, d]. `pages` [S, 2] has the page
    and the place in it of each token.

    The loops over keys in the first step and over a head's width in the last are those that a compiler vectorizes:
    neither is a sum, so that the width of vectors does not matter."""
    _, heads, width = query.shape
    groups = keys.shape[2]
    shift = np.uint32(32 - 8 * keys.itemsize)
    query_start = key_start = 0
    for sequence in range(len(query_ends)):
        query_end, key_end = query_ends[sequence], key_ends[sequence]
        length = key_end - key_start
        weights = np.empty(length, np.float32)
        bits_of_columns, bits_of_rows = np.empty((width, length), np.uint32), np.empty((length, width), np.uint32)
        columns, rows = bits_of_columns.view(np.float32), bits_of_rows.view(np.float32)
        for head in range(heads):
            shared = head * groups // heads
            if head == 0 or shared != (head - 1) * groups // heads:
                for key in range(length):
                    page, place = pages[key_start + key]
                    for i in range(width):
                        bits_of_columns[i, key] = np.uint32(keys[page, place, shared, i]) << shift
                        bits_of_rows[key, i] = np.uint32(values[page, place, shared, i]) << shift
            for token in range(query_start, query_end):
                seen = length - query_end + token + 1
                weights[:seen] = 0
                for i in range(width):
                    factor = query[token, head, i]
                    for key in range(seen):
                        weights[key] += factor * columns[i, key]
                largest = weights[:seen].max()
                total = np.float32(0)
                for key in range(seen):
                    weights[key] = math.exp((weights[key] - largest) * scale)
                    total += weights[key]
                output[token, head] = 0
                for key in range(seen):
                    factor = weights[key] / total
                    for i in range(width):
                        output[token, head, i] += factor * rows[key, i]
        query_start, key_start = query_end, key_end
