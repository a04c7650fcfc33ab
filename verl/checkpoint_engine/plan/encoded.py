"""Reading what another process wrote: the answer is a value of the kind asked for or a named error, whatever it was."""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

from ..errors import CheckpointEngineError, TransportError

T = TypeVar("T")

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError, OverflowError)
"""What decoders raise: text that is no UTF-8 is a ValueError, what is nested too deep a RecursionError."""
FAST = 1
"""zlib's level: others take several times as long."""


def deflated(data: bytes | memoryview) -> bytes:
    return zlib.compress(data, FAST)


def inflated(data: bytes, most_nbytes: int) -> bytes:
    """What `deflated` was given. Raises ValueError for anything else, and before it takes memory for more."""
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
    """msgpack. Raises `error`, which says that `data` is not `what`."""
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
    """JSON. Raises as `unpacked`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UNREADABLE as exc:
        raise error(f"not {what}: {exc}") from exc
