"""Files as somebody else might leave them: real ones, changed in a few places, as bytes or as what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

HEADS = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"),
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\x91" * 2_000, b"[" * 2_000, b'{"a":' * 500),
    *(b"\xff\xfe\xfd", b"\x00", b"\xed\xa0\x80", b"9" * 5_000, b"1e999", b"-1", b"", b"r\xff\xff\xff\x7f"),
)
"""What decoders stumble over: long arrays and texts that are announced, deep nesting, texts that are no UTF-8."""
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(None, True, 0.5, 1e308, "", "x", "../../x", "a\0b", b"", b"\xff" * 64, [], {}, [[]], [0] * 100),
    *([2**40] * 100, ["x"] * 3, {"a": {"a": {}}}, "<u8", "|O", "U999999999", "i4,i4", ".", "/", "9" * 400),
)


def changed(seeds: list[bytes], form: str, random: Random) -> bytes:
    """One of `seeds`, changed. `form`: `bytes`, or how they are encoded, `msgpack` or `json`."""
    data = random.choice(seeds)
    if form == "msgpack" and random.random() < 0.6:
        return msgspec.msgpack.encode(_content(msgspec.msgpack.decode(data), random))
    if form == "json" and random.random() < 0.6:
        return json.dumps(_content(json.loads(data), random), default=repr).encode()
    return _bytes(data, random)


def _bytes(data: bytes, random: Random) -> bytes:
    found = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(found))
        until = min(at + random.choice((0, 1, 1, 1, 4, 16, 64, 10**6)), len(found))
        kinds: tuple[Callable[[], bytes], ...] = (
            lambda: random.randbytes(random.randint(0, 9)),
            lambda: random.randbytes(1),
            lambda: random.choice(HEADS),
            lambda at=at: bytes(found[max(at - 40, 0) : at]),
        )
        found[at:until] = random.choice(kinds)()
    return bytes(found)


def _content(value: Any, random: Random) -> Any:
    """Well-formed, with another value in one or two places."""
    for _ in range(random.randint(1, 2)):
        value = _with_other(value, random)
    return value


def _with_other(value: Any, random: Random) -> Any:
    if isinstance(value, bytes) and random.random() < 0.5:
        try:  # one encoded within another
            return msgspec.msgpack.encode(_with_other(msgspec.msgpack.decode(value), random))
        except (ValueError, TypeError, RecursionError, OverflowError):
            return _bytes(value, random)
    if isinstance(value, (list, dict)) and value and random.random() < 0.9:
        items: Any = list(value) if isinstance(value, list) else dict(value)
        at = random.randrange(len(items)) if isinstance(items, list) else random.choice(list(items))
        what = random.random()
        if what < 0.1:
            del items[at]
        elif what < 0.2 and isinstance(items, list):
            items.insert(at, items[at])
        elif what < 0.2:
            items[f"{at}x"] = items[at]
        else:
            items[at] = _with_other(items[at], random)
        return items
    return random.choice((random.choice(VALUES), random.choice(VALUES), random.randint(-(2**63), 2**64 - 1)))
