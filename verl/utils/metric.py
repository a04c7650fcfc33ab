"""verl's import path of the function that reduces metrics of several micro-batches or ranks."""

from __future__ import annotations

from typing import Any

import numpy as np


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace each list by its largest value if the name contains `max`, else its smallest if it contains `min`, else
    its mean. Returns `metrics`."""
    for name, values in metrics.items():
        metrics[name] = _way(name)(values)
    return metrics


def _way(name: str) -> Any:
    return np.max if "max" in name else np.min if "min" in name else np.mean
