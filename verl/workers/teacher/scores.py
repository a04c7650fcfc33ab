"""What a teacher says about a response."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Scores(NamedTuple):
    log_probs: np.ndarray
    """Of the n tokens of the response, float32 [n], at temperature 1."""
    candidates: np.ndarray
    """The teacher's K likeliest tokens in the place of each, int32 [n, K],"""
    candidate_log_probs: np.ndarray
    """and their log-probs, float32 [n, K]."""
