"""The bytes that a member reads from each peer, and the time that this takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ..plan.member_report import BUSIEST_OF_NODE, Link, busiest


class Traffic:
    """Bytes and busy seconds per peer, in one fetch loop and thread. A peer is busy while a transfer from it runs."""

    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}
        self.seconds: dict[int, float] = {}
        self._flying: dict[int, int] = {}
        self._since_s: dict[int, float] = {}

    def begin(self, peer: int) -> None:
        if not self._flying.get(peer):
            self._since_s[peer] = time.perf_counter()
        self._flying[peer] = self._flying.get(peer, 0) + 1

    def end(self, peer: int, nbytes: int) -> None:
        """Count a transfer of `nbytes` from `peer` that has arrived."""
        self.nbytes[peer] = self.nbytes.get(peer, 0) + nbytes
        self._flying[peer] -= 1
        if not self._flying[peer]:
            self.seconds[peer] = self.seconds.get(peer, 0.0) + time.perf_counter() - self._since_s[peer]


def links_of(member: str, loops: Iterable[Traffic], name_of: Callable[[int], str]) -> tuple[Link, ...]:
    """The busiest links of `member`. Loops run in parallel, so a link's time is the longest of any loop."""
    nbytes: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for loop in loops:
        for peer, busy_s in loop.seconds.items():
            nbytes[peer] = nbytes.get(peer, 0) + loop.nbytes[peer]
            seconds[peer] = max(seconds.get(peer, 0.0), busy_s)
    links = (
        Link(member=member, peer=name_of(peer), nbytes=nbytes[peer], seconds=busy_s) for peer, busy_s in seconds.items()
    )
    return busiest(links, BUSIEST_OF_NODE)
