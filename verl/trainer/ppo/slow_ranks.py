"""Finds slow trainer ranks, by each rank's own time per token, in which it waits for no other."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from verl.workers.own_time import Own, Owns

logger = logging.getLogger(__name__)

RATIO = 1.3
"""A slow rank takes more than so many times the median of the other ranks."""
DEVIATIONS = 5.0
"""Its distance from that median is more than so many medians of the others' distances."""
LEAST_S = 0.01
"""A slow rank loses more than so many seconds against that median; less may be chance."""
STEPS = 5
"""The median over so many steps counts, because one step alone may be an outlier."""
MOST_RANKS = 32
"""Up to so many ranks, each rank has its own metrics."""


class SlowRanks:
    """Checks every step of a run. Used on the driver."""

    def __init__(self, where: Callable[[int], str]) -> None:
        """`where` returns a rank's process and host, for the warning."""
        self._where = where
        self._rates: dict[tuple[str, str], deque[float]] = {}
        """Seconds for a token in the last steps, by phase and process."""
        self._slow: set[tuple[str, str]] = set()

    def look(self, ranks: Sequence[Owns]) -> dict[str, float]:
        """Metrics of a step from each rank's own time. Warns of a slow rank."""
        metrics: dict[str, float] = {}
        for phase in dict.fromkeys(phase for rank in ranks for phase in rank):
            own = [rank.get(phase, Own()) for rank in ranks]
            if len(ranks) <= MOST_RANKS:
                metrics |= {f"trainer/own_s/{phase}/rank_{rank}": one.seconds for rank, one in enumerate(own)}
            if len(ranks) > 1 and all(one.tokens for one in own):
                metrics |= self._compare(phase, own)
        return metrics

    def _compare(self, phase: str, own: Sequence[Own]) -> dict[str, float]:
        rates = [one.seconds / one.tokens for one in own]
        slowness = [_slowness(rates, rank) for rank in range(len(own))]
        slowest = max(range(len(own)), key=slowness.__getitem__)
        keys = [(phase, f"rank {rank} ({self._where(rank)})") for rank in range(len(own))]
        kept = {key: self._rates.get(key) or deque(maxlen=STEPS) for key in keys}
        self._rates = {key: kept for key, kept in self._rates.items() if key[0] != phase} | kept
        for key, rate in zip(keys, rates, strict=True):
            kept[key].append(rate)
        if all(len(of) == STEPS for of in kept.values()):
            usual = [median(of) for of in kept.values()]
            for rank, key in enumerate(keys):
                self._tell(key, _slowness(usual, rank), is_slow=_is_outlier(usual, rank, own[rank].tokens))
        return {f"trainer/slowest_rank/{phase}": slowest, f"trainer/slowness/{phase}": slowness[slowest]}

    def _tell(self, key: tuple[str, str], ratio: float, *, is_slow: bool) -> None:
        phase, rank = key
        if is_slow and key not in self._slow:
            self._slow.add(key)
            logger.warning(
                "trainer %s is slow: in %s it takes %.1f times as long per token as the others, which wait for it "
                "(median of %d steps; trainer/slowness/%s)",
                rank,
                phase,
                ratio,
                STEPS,
                phase,
            )
        elif not is_slow and key in self._slow:
            self._slow.remove(key)
            logger.info("trainer %s is as fast as the others again in %s", rank, phase)


def _others(rates: Sequence[float], rank: int) -> list[float]:
    return [rate for other, rate in enumerate(rates) if other != rank]


def _slowness(rates: Sequence[float], rank: int) -> float:
    return rates[rank] / max(median(_others(rates, rank)), 1e-12)


def _is_outlier(rates: Sequence[float], rank: int, tokens: int) -> bool:
    others = _others(rates, rank)
    middle = median(others)
    spread = median(abs(rate - middle) for rate in others)
    longer = rates[rank] - middle
    return rates[rank] > RATIO * middle and longer > DEVIATIONS * spread and longer * tokens > LEAST_S
