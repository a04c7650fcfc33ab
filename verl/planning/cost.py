"""How long a sync takes, as arithmetic: the formulas, and where each comes from. Pure; no torch, no I/O.

Phases follow each other, as in a `SyncReport`. With n_r the bytes of trainer rank r, N those of the version, T threads:

    publish     max_r n_r / min(T * copy, to_host)                    full     (a rank copies and digests its pieces)
                max_r n_r / (T * encode) + f * n_r / w * ENCODE_S     delta    (`plan/delta_choice.py`)
    stage       max over nodes of: drained + hops * 2 * part / rate,  or messages * message_s if that is more
                delta: the same with f * b / w of the bytes, then N / (T * apply) + f * N / w * APPLY_S
    verify      N / (T * digest); nothing with deltas, whose pieces are digested as they are made
    activate    max(bytes of an engine rank / load, tensors * tensor_s)
    each phase  call_s + members * member_s

*Drained* is when a fluid has run through the network: every transfer of members gets its max-min fair share of each
resource on its way (Bertsekas and Gallager, Data Networks, 6.5.2: progressive filling), and shares are dealt anew when
one ends. Resources are a host's link out and in, the way of a switch to the others, and what processes push through
sockets. Bytes that are passed on flow as those of owners do, while the rest is still to come; a node is two parts
behind the one before it, because that many are under way (`links/holder.py`, `links/gloo_chain.py`).

Messages follow the alpha-beta model (Hockney 1994) with overlap: several are under way, so alpha counts only where it
is all that a node's thread does.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl.checkpoint_engine.plan.delta_choice import APPLY_S, ENCODE_S, bits_per_change

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

PARTS_BEHIND = 2
SAME = 1.01
"""Transfers that end within a hundredth of each other are taken to end one after the other at unchanged rates."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second, unless the name ends in `_s` (seconds), and of one thread, device or process."""

    copy: float
    """A thread copies and digests a rank's pieces."""
    digest: float
    encode: float
    """A thread copies pieces and finds that nothing changed."""
    apply: float
    """A thread makes a version of the one before, and digests it, if nothing changed."""
    to_host: float
    """A device's memory to the host's; infinite where weights are in host memory."""
    load: float
    """An engine rank takes weights out of a slot."""
    wire_share: float
    """Of a link's rate, that arrives as weights."""
    process: float
    """What a process sends or receives at most, through the kernel's sockets or a library."""
    message_s: float
    tensor_s: float
    """What an engine's loader takes for a tensor beside its bytes."""
    call_s: float
    member_s: float
    """What a phase takes for each member that is called."""
    threads: float = 4
    """Of a member that copies or digests large memory."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """`connections` transfers of together `nbytes` that take the same way."""

    nbytes: float
    resources: tuple[Hashable, ...]
    connections: int = 1


def max_min(ways: Places, weights: Floats, capacity: Floats) -> Floats:
    """The rate of each flow. `ways[f]`: the resources that flow f uses, as places in `capacity`.

    All rates grow together, in proportion to their weights, until a resource is full; what crosses it keeps its rate,
    and the others grow on. Places may be repeated where nothing limits: `capacity` is infinite there.
    """
    rates = np.full(len(weights), np.inf)
    left = capacity.astype(float).copy()
    growing = np.isfinite(left[ways]).any(axis=1)
    while growing.any():
        load = _sums(ways, np.where(growing, weights, 0.0), len(left))
        level = np.divide(left, load, out=np.full(len(left), np.inf), where=load > 0)
        lowest = level.min()
        full = level <= lowest * (1 + 1e-9)
        stopped = growing & full[ways].any(axis=1)
        rates[stopped] = weights[stopped] * lowest
        left = np.maximum(left - _sums(ways, np.where(stopped, rates, 0.0), len(left)), 0.0)
        growing &= ~stopped
    return rates


def _sums(ways: Places, values: Floats, count: int) -> Floats:
    """Of each resource, what the flows on it have together."""
    return np.bincount(ways.reshape(-1), np.repeat(values, ways.shape[1]), count).astype(float)


def drained(flows: Sequence[Flow], capacity: Mapping[Hashable, float]) -> Floats:
    """Seconds until the last byte of each flow has come, if all begin now."""
    names = {name: place for place, name in enumerate(capacity)}
    width = max((len(flow.resources) for flow in flows), default=0)
    ways = np.full((len(flows), max(width, 1)), len(names))  # behind the last resource there is no limit
    for row, flow in enumerate(flows):
        ways[row, : len(flow.resources)] = [names[name] for name in flow.resources]
    weights = np.array([flow.connections for flow in flows], float)
    limits = np.array([*capacity.values(), np.inf], float)
    left = np.array([flow.nbytes for flow in flows], float)
    ends = np.zeros(len(flows))
    now = 0.0
    running = left > 0
    while running.any():
        rows = np.flatnonzero(running)
        rates = max_min(ways[rows], weights[rows], limits)
        needed = left[rows] / rates
        step = needed.min() * SAME
        over = needed <= step
        ends[rows[over]] = now + needed[over]
        now += step
        rest = ~over  # the rate of what is over may be infinite
        left[rows[rest]] = np.maximum(left[rows[rest]] - rates[rest] * step, 0.0)
        running[rows[over]] = False
    return ends


def publish_s(rank_nbytes: float, rates: Rates) -> float:
    """Of the rank with most bytes."""
    return rank_nbytes / min(rates.threads * rates.copy, rates.to_host)


def publish_delta_s(rank_nbytes: float, fraction: float, word_nbytes: float, rates: Rates) -> float:
    """The constant is of one thread."""
    return (rank_nbytes / rates.encode + fraction * rank_nbytes / word_nbytes * ENCODE_S) / rates.threads


def moved_part(fraction: float, word_nbytes: float) -> float:
    """Of the bytes of a version, what its delta has."""
    return min(fraction * bits_per_change(fraction) / (8 * word_nbytes), 1.0)


def apply_s(nbytes: float, fraction: float, word_nbytes: float, rates: Rates) -> float:
    """The constant is of two threads."""
    changes = fraction * nbytes / word_nbytes * APPLY_S * 2 / max(rates.threads, 2)
    return nbytes / (rates.threads * rates.apply) + changes


def verify_s(nbytes: float, rates: Rates) -> float:
    return nbytes / (rates.threads * rates.digest)


def pipeline_s(hops: int, part_nbytes: float, rate: float, rates: Rates) -> float:
    """How far the last node is behind the first, where each passes on what it gets."""
    return hops * (PARTS_BEHIND * part_nbytes / rate + rates.message_s)


def activate_s(rank_nbytes: float, tensors: int, rates: Rates) -> float:
    return max(rank_nbytes / rates.load, tensors * rates.tensor_s)


def calls_s(members: int, rates: Rates) -> float:
    return rates.call_s + members * rates.member_s
