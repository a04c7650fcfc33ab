"""Converts values of users' functions to plain Python: to numbers, and to values that JSON can hold."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

DEEPEST = 32
"""The most levels of containers that `plain` keeps; deeper values become text."""
_DEEPEST_ARRAY = 3
"""An array of objects may hold another library's scalar."""
_MOST_BITS = 8192
"""Python refuses to write longer integers in decimal digits."""


def as_number(value: Any) -> int | float | None:
    """`value` as a Python number if it is one: NumPy's and torch's scalars, arrays of one element, bools; else None.

    Integers stay integers, of any size; fractions beyond the range of floats are infinite. Texts and complex numbers
    are no numbers here.
    """
    for _ in range(_DEEPEST_ARRAY):
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, (numbers.Real, Decimal)):
            return _float(value)
        if isinstance(value, (str, bytes)) or not hasattr(value, "item") or not hasattr(value, "shape"):
            return None
        if any(size != 1 for size in value.shape):
            return None
        value = value.item()
    return None


def as_float(value: Any) -> float | None:
    """As `as_number`, for arithmetic: the nearest float, infinite for integers beyond the range of floats."""
    number = as_number(value)
    return None if number is None else _float(number)


def as_text(value: Any) -> str:
    """`str(value)`, or a substitute if that raises."""
    try:
        return str(value)
    except Exception as exc:  # noqa: BLE001 - a user's class may fail to name itself; that ends nothing
        return f"<{type(value).__name__} without a text: {type(exc).__name__}>"


def plain(value: Any, depth: int = 0) -> Any:
    """`value` of numbers, texts, None, lists and dicts with text keys; anything else as its text.

    The result can be pickled, and written by `json.dumps`. Bools stay bools.
    """
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, str) else str(value)
    number = as_number(value)
    if number is not None:
        if isinstance(number, int) and number.bit_length() > _MOST_BITS:
            return hex(number)
        return bool(number) if _is_boolean(value) else number
    if depth < DEEPEST:
        if isinstance(value, Mapping):
            return {str(name): plain(each, depth + 1) for name, each in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain(each, depth + 1) for each in value]
        if hasattr(value, "tolist"):
            return plain(value.tolist(), depth + 1)
    return as_text(value)


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    except ValueError:  # a signalling NaN
        return math.nan


def _is_boolean(value: Any) -> bool:
    return "bool" in str(getattr(value, "dtype", ""))
