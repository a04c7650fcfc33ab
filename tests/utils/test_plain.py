import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from verl.utils.plain import DEEPEST, as_float, as_number, plain


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2**80, 2**80),
        (True, 1),
        (np.bool_(False), 0),
        (np.int64(2**62 + 1), 2**62 + 1),
        (np.array(0.5), 0.5),
        (np.array([[7]]), 7),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (Decimal("0.5"), 0.5),
        (np.array(np.float32(0.5), dtype=object), 0.5),
        (np.array(torch.tensor(0.5), dtype=object), 0.5),
        (np.array(np.bool_(True), dtype=object), 1),
        (np.longdouble(0.5), 0.5),
        (Decimal("1e999"), math.inf),
        (-Fraction(10**400), -math.inf),
        ("1", None),
        (b"1", None),
        (None, None),
        (1j, None),
        ([1], None),
        (np.array([1, 2]), None),
        (np.array([]), None),
        (np.str_("1"), None),
    ],
    ids=str,
)
def test_numbers_of_every_library_are_numbers(value, number):
    found = as_number(value)
    assert found == number
    assert type(found) is type(number)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (torch.tensor(False), False),
        ({"a": (np.int8(1), {2})}, {"a": [1, [2]]}),
        ({1: None}, {"1": None}),
        (np.array([[1.5, 2.0]]), [[1.5, 2.0]]),
        (np.array([np.float32(1), "x"], dtype=object), [1.0, "x"]),
        (np.str_("x"), "x"),
        (int, "<class 'int'>"),
        (10**40, 10**40),
        (16**3000, "0x1" + 3000 * "0"),
    ],
    ids=str,
)
def test_values_become_what_json_can_write(value, expected):
    assert json.dumps(plain(value)) == json.dumps(expected)


def test_deep_and_circular_values_end():
    value = []
    value.append(value)
    found, depth = plain(value), 0
    while isinstance(found, list):
        [found], depth = found, depth + 1
    assert depth == DEEPEST


def test_a_value_that_cannot_name_itself_has_a_text():
    class Bad:
        def __str__(self):
            raise RuntimeError("no")

    assert plain(Bad()) == "<Bad without a text: RuntimeError>"


@pytest.mark.parametrize(("value", "number"), [(10**400, math.inf), (-(10**400), -math.inf), (True, 1.0), ("1", None)])
def test_integers_beyond_the_range_of_floats_are_infinite_in_arithmetic(value, number):
    assert as_float(value) == number


def test_a_signalling_nan_is_a_nan():
    assert math.isnan(as_float(Decimal("sNaN")))
