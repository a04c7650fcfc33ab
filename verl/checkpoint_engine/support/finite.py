"""Find NaN and infinite weights. It imports torch on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """The least and the largest of floating-point `values`, in one pass without a copy; NaN if one of them is NaN.

    (0, 0) for no values, and for other dtypes.
    """
    import torch

    if not values.is_floating_point() or not values.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(values if values.dtype.itemsize > 1 else values.float())  # not of float8
    return float(low), float(high)


def named_extremes(low: float, high: float) -> str:
    """The extremes in words, for messages."""
    return "NaN" if low != low else f"values of {low:.3g} to {high:.3g}"
