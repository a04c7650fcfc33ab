"""The layout: where tensors lie, and that everybody finds the same."""

from __future__ import annotations

import pytest

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.plan.layout import ALIGNMENT, Layout
from verl.checkpoint_engine.plan.types import TensorSpec


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


SPECS = [spec("embed", 10, 8), spec("norm", 8, dtype="float32"), spec("none", 0, 4), spec("scale"), spec("head", 10, 8)]


def test_tensors_lie_aligned_one_after_the_other_without_overlap():
    layout = Layout.of(SPECS)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    ends = [offset + tensor.nbytes for tensor, offset in layout]
    assert all(end <= start for end, start in zip(ends, [*layout.offsets[1:], layout.nbytes], strict=True))
    assert layout.payload_nbytes == 160 + 32 + 0 + 2 + 160


def test_encoding_keeps_everything():
    layout = Layout.of(SPECS)
    assert Layout.decode(layout.encode()) == layout
    assert Layout.of([]) == Layout.decode(Layout.of([]).encode())


@pytest.mark.parametrize(
    "other",
    [
        [spec("renamed", 10, 8), *SPECS[1:]],
        [spec("embed", 8, 10), *SPECS[1:]],
        [spec("embed", 10, 8, dtype="float16"), *SPECS[1:]],
        SPECS[::-1],
        SPECS[:-1],
    ],
    ids=["name", "shape", "dtype", "order", "one less"],
)
def test_the_digest_tells_models_apart(other: list[TensorSpec]):
    assert Layout.of(SPECS).digest == Layout.of(list(SPECS)).digest
    assert Layout.of(SPECS).digest != Layout.of(other).digest


def test_one_error_lists_everything_that_is_wrong_with_the_specs():
    with pytest.raises(PlanError) as raised:
        Layout.of(
            [spec("twice", 1), spec("twice", 1), spec("odd", 2, dtype="float7"), spec("negative", -1), spec("ok", 1)]
        )
    message = str(raised.value)
    assert "twice: appears twice" in message
    assert "odd: unknown dtype 'float7'" in message
    assert "negative: negative size" in message
    assert "ok:" not in message


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03"])
def test_bytes_that_are_no_layout_are_refused(data: bytes):
    with pytest.raises(PlanError, match="not an encoded layout"):
        Layout.decode(data)
