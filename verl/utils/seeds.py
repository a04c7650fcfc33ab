"""Seeds and names that follow from what they are for, so that no order of arrival is in them."""

from __future__ import annotations

import hashlib

BELOW = 2**62
"""Engines take seeds of 64 bits with a sign."""


def derived(*parts: object) -> int:
    """A number in [0, BELOW) that depends on the texts of `parts` and their order alone, in every process."""
    return int.from_bytes(_digest(parts)[:8], "little") % BELOW


def derived_name(*parts: object) -> str:
    """32 hexadecimal digits that depend on the texts of `parts` and their order alone."""
    return _digest(parts).hex()


def _digest(parts: tuple[object, ...]) -> bytes:
    return hashlib.blake2b(repr([str(part) for part in parts]).encode(), digest_size=16).digest()
