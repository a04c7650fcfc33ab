"""Reading what another process wrote: the answer is a value of the kind asked for or a named error, whatever it was."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from verl.checkpoint_engine.errors import CheckpointEngineError, TransportError

T = TypeVar("T")

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError, OverflowError)
"""What decoders raise: text that is no UTF-8 is a ValueError, what is nested too deep a RecursionError."""


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
