"""Decode bytes from another process: the result is a value of the requested type, or a named error for any input."""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

from ..errors import CheckpointEngineError, TransportError

T = TypeVar("T")

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError, OverflowError)
"""What decoders raise: ValueError for text that is no UTF-8, RecursionError for values that are nested too deep."""
FAST = 1
"""The zlib level: higher ones take several times as long."""


def deflated(data: bytes | memoryview) -> bytes:
    return zlib.compress(data, FAST)


def inflated(data: bytes, most_nbytes: int) -> bytes:
    """Undo `deflated`. Raises ValueError for other bytes, and for more than `most_nbytes` before allocating them."""
    inflating = zlib.decompressobj()
    try:
        plain = inflating.decompress(data, max(most_nbytes, 1))
    except zlib.error as exc:
        raise ValueError(f"damaged: {exc}") from exc
    if not inflating.eof or inflating.unused_data:
        raise ValueError(f"more than {most_nbytes} bytes, or less than was written")
    return plain


def unpacked(
    data: bytes | bytearray | memoryview,
    kind: type[T],
    what: str,
    error: type[CheckpointEngineError] = TransportError,
) -> T:
    """Decode msgpack as `kind`. Raises `error` with the text "not `what`"."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as exc:
        raise error(f"not {what}: {exc}") from exc


def parsed(
    text: str | bytes,
    kind: type[T],
    what: str,
    error: type[CheckpointEngineError] = TransportError,
) -> T:
    """Decode JSON as `kind`. Raises as `unpacked`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UNREADABLE as exc:
        raise error(f"not {what}: {exc}") from exc
