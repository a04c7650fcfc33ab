"""A teacher's log-probs of a response."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Scores(NamedTuple):
    log_probs: np.ndarray
    """Log-probs of the n tokens of the response, float32 [n], at temperature 1."""
    candidates: np.ndarray
    """The teacher's K likeliest tokens at each position, int32 [n, K]."""
    candidate_log_probs: np.ndarray
    """The log-probs of `candidates`, float32 [n, K]."""
