"""Whether weights are numbers. torch is imported where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """The least and the largest of floating-point `values`, in one pass without a copy; NaN if one of them is NaN.

    (0, 0) if there are none, or they are no floating-point numbers.
    """
    import torch

    if not values.is_floating_point() or not values.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(values if values.dtype.itemsize > 1 else values.float())  # not of float8
    return float(low), float(high)


def named_extremes(low: float, high: float) -> str:
    """For messages."""
    return "NaN" if low != low else f"values of {low:.3g} to {high:.3g}"
