"""The time of a sync: formulas, with the source of each. Pure; no torch, no I/O.

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
one ends. Resources are a host's link out and in, a switch's link to the others, and the processes' rate through
sockets. Forwarded bytes flow like those of owners, while the rest is still arriving; a node is two parts behind the
previous one, because two parts are in flight (`links/holder.py`, `links/gloo_chain.py`).

Messages follow the alpha-beta model (Hockney 1994) with overlap: several are in flight, so alpha counts only if a
node's thread does nothing else.
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
"""Transfers whose ends differ by less than a hundredth are computed as ending at unchanged rates."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second, unless the name ends in `_s` (seconds), and of one thread, device or process."""

    copy: float
    """One thread that copies and digests a rank's pieces."""
    digest: float
    encode: float
    """One thread that copies pieces and finds no change."""
    apply: float
    """One thread that makes and digests a version from the previous one, without changes."""
    to_host: float
    """Copies from a device's memory to the host's; infinite for weights in host memory."""
    load: float
    """One engine rank that loads weights from a slot."""
    wire_share: float
    """The fraction of a link's rate that carries weights."""
    process: float
    """The most that a process sends or receives, through the kernel's sockets or a library."""
    message_s: float
    tensor_s: float
    """An engine's loader per tensor, beside its bytes."""
    call_s: float
    member_s: float
    """A phase's time per member that is called."""
    threads: float = 4
    """Threads of a member that copies or digests large memory."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """`connections` transfers of `nbytes` in total over the same resources."""

    nbytes: float
    resources: tuple[Hashable, ...]
    connections: int = 1


def max_min(ways: Places, weights: Floats, capacity: Floats) -> Floats:
    """The rate of each flow. `ways[f]` are the resources of flow f, as indices into `capacity`.

    All rates grow together, in proportion to their weights, until a resource is full; its flows keep their rate, and
    the others grow on. Indices with infinite `capacity` may be repeated.
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
    """Seconds until the last byte of each flow arrives, if all start now."""
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
    """Seconds of publish: those of the rank with the most bytes."""
    return rank_nbytes / min(rates.threads * rates.copy, rates.to_host)


def publish_delta_s(rank_nbytes: float, fraction: float, word_nbytes: float, rates: Rates) -> float:
    """Seconds of publish with deltas. ENCODE_S is one thread's."""
    return (rank_nbytes / rates.encode + fraction * rank_nbytes / word_nbytes * ENCODE_S) / rates.threads


def moved_part(fraction: float, word_nbytes: float) -> float:
    """The size of a delta as a fraction of the version's."""
    return min(fraction * bits_per_change(fraction) / (8 * word_nbytes), 1.0)


def apply_s(nbytes: float, fraction: float, word_nbytes: float, rates: Rates) -> float:
    """Seconds to apply a delta. APPLY_S is two threads'."""
    changes = fraction * nbytes / word_nbytes * APPLY_S * 2 / max(rates.threads, 2)
    return nbytes / (rates.threads * rates.apply) + changes


def verify_s(nbytes: float, rates: Rates) -> float:
    return nbytes / (rates.threads * rates.digest)


def pipeline_s(hops: int, part_nbytes: float, rate: float, rates: Rates) -> float:
    """Seconds by which the last forwarding node is behind the first."""
    return hops * (PARTS_BEHIND * part_nbytes / rate + rates.message_s)


def activate_s(rank_nbytes: float, tensors: int, rates: Rates) -> float:
    return max(rank_nbytes / rates.load, tensors * rates.tensor_s)


def calls_s(members: int, rates: Rates) -> float:
    return rates.call_s + members * rates.member_s
